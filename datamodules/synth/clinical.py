"""The clinical table of a synthetic cohort, with the columns of ADNIMERGE that matter here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .cohort import SCANNERS, SITE, ScanPlan, Subject

ADNIMERGE_COLUMNS = (
    "RID",
    "PTID",
    "VISCODE",
    "SITE",
    "COLPROT",
    "ORIGPROT",
    "EXAMDATE",
    "DX_bl",
    "AGE",
    "PTGENDER",
    "APOE4",
    "CDRSB",
    "MMSE",
    "FLDSTRENG",
    "DX",
    "Month",
)
_GROUPS = {"NC": "CN", "sMCI": "EMCI", "pMCI": "LMCI", "AD": "AD"}
_WORDS = {"NC": "CN", "MCI": "MCI", "AD": "Dementia"}


def mmse(subject: Subject, months: int) -> float:
    """Mini-mental state: about 29.2, falling with severity."""
    severity = subject.severity + subject.yearly * months / 12.0
    scatter = ((subject.number * 37 + months) % 61) / 60.0 * 2.0 - 1.0
    return 29.2 - 9.0 * severity * (1.0 + 0.3 * scatter)


def cdr_sb(subject: Subject, months: int) -> float:
    """Clinical dementia rating, sum of boxes, in halves: 0 without disease, about 4 with AD."""
    severity = subject.severity + subject.yearly * months / 12.0
    return min(18.0, round(2 * max(0.0, 15.0 * severity - 0.9)) / 2)


def site(subject: Subject) -> int:
    """Where the person is scanned: a site for each scanner, all of them unused by ADNI."""
    start = SITE - SCANNERS if subject.scanner < SCANNERS else SITE - 4 * SCANNERS
    return start + subject.scanner


def clinical_rows(plans: Iterable[ScanPlan]) -> Iterator[tuple[str, ...]]:
    """One row per subject and visit."""
    for subject in people(plans):
        for months, dx in subject.course.visits:
            yield (
                registry_number(subject),
                subject.ptid,
                f"m{months:02d}" if months else "bl",
                str(site(subject)),
                subject.phase,
                subject.phase,
                f"{subject.day(months):%Y-%m-%d}",
                group(subject),
                f"{subject.age:.1f}",
                "Female" if subject.sex == "F" else "Male",
                str(subject.apoe4),
                f"{cdr_sb(subject, months):.1f}",
                f"{mmse(subject, months):.0f}",
                f"{subject.field_strength:g} Tesla MRI",
                _WORDS[dx],
                str(months),
            )


def people(plans: Iterable[ScanPlan]) -> list[Subject]:
    """The subjects of the plans, each once."""
    return list(dict.fromkeys(plan.subject for plan in plans))


def registry_number(subject: Subject) -> str:
    """RID."""
    return str(int(subject.ptid.rpartition("_")[2]))


def group(subject: Subject) -> str:
    """The group at screening."""
    return _GROUPS[subject.diagnosis]
