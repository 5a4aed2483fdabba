"""The clinical table of a synthetic cohort, with the columns of ADNIMERGE that matter here."""

from __future__ import annotations

from collections.abc import Iterable

from .cohort import SCANNERS, SITE, ScanPlan, Subject

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


def clinical_rows(plans: Iterable[ScanPlan]) -> list[dict[str, object]]:
    """One row per subject and visit."""
    return [
        {
            "RID": registry_number(subject),
            "PTID": subject.ptid,
            "VISCODE": f"m{months:02d}" if months else "bl",
            "SITE": site(subject),
            "COLPROT": subject.phase,
            "ORIGPROT": subject.phase,
            "EXAMDATE": f"{subject.day(months):%Y-%m-%d}",
            "DX_bl": group(subject),
            "AGE": f"{subject.age:.1f}",
            "PTGENDER": "Female" if subject.sex == "F" else "Male",
            "APOE4": subject.apoe4,
            "CDRSB": f"{cdr_sb(subject, months):.1f}",
            "MMSE": f"{mmse(subject, months):.0f}",
            "FLDSTRENG": f"{subject.field_strength:g} Tesla MRI",
            "DX": _WORDS[dx],
            "Month": months,
        }
        for subject in people(plans)
        for months, dx in subject.course.visits
    ]


def people(plans: Iterable[ScanPlan]) -> list[Subject]:
    """The subjects of the plans, each once."""
    return list(dict.fromkeys(plan.subject for plan in plans))


def registry_number(subject: Subject) -> str:
    """RID."""
    return str(int(subject.ptid.rpartition("_")[2]))


def group(subject: Subject) -> str:
    """The group at screening."""
    return _GROUPS[subject.diagnosis]
