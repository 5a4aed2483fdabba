"""The clinical table of a synthetic cohort, with the columns of ADNIMERGE that matter here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .cohort import SITE, ScanPlan, Subject

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
    "MMSE",
    "DX",
    "Month",
)
_MONTHS = (0, 6, 12, 24, 36, 48)  # people are seen more often than they are scanned
_GROUPS = {"NC": "CN", "sMCI": "EMCI", "pMCI": "LMCI", "AD": "AD"}
_WORDS = {"NC": "CN", "sMCI": "MCI", "pMCI": "MCI", "AD": "Dementia"}


def mmse(subject: Subject, months: int) -> float:
    """Mini-mental state: about 29.2, falling with severity."""
    severity = subject.severity + subject.yearly * months / 12.0
    scatter = ((subject.number * 37 + months) % 61) / 60.0 * 2.0 - 1.0
    return 29.2 - 9.0 * severity * (1.0 + 0.3 * scatter)


def clinical_rows(plans: Iterable[ScanPlan]) -> Iterator[tuple[str, ...]]:
    """One row per subject and visit; progressive MCI turns into dementia after 1 to 3 years."""
    for subject in dict.fromkeys(plan.subject for plan in plans):
        conversion = (12, 24, 36)[subject.number % 3]
        for months in _MONTHS:
            word = _WORDS[subject.diagnosis]
            if subject.diagnosis == "pMCI" and months >= conversion:
                word = "Dementia"
            yield (
                str(int(subject.ptid.rpartition("_")[2])),
                subject.ptid,
                f"m{months:02d}" if months else "bl",
                str(SITE),
                subject.phase,
                subject.phase,
                f"{subject.day(months):%Y-%m-%d}",
                _GROUPS[subject.diagnosis],
                f"{subject.age:.1f}",
                "Female" if subject.sex == "F" else "Male",
                f"{mmse(subject, months):.0f}",
                word,
                str(months),
            )
