"""How diagnoses develop: the usual courses, and one for every turn the label rule has to take."""

from __future__ import annotations

from dataclasses import dataclass

from .levels import Diagnosis

_MONTHS = (0, 6, 12, 24, 36, 48)  # people are seen more often than they are scanned


@dataclass(frozen=True)
class Course:
    """How the diagnosis of a person develops.

    Attributes:
        visits: month and diagnosis of each.
        expected: the class or the reason that the scan at month 0 should get.
    """

    visits: tuple[tuple[int, str], ...]
    expected: str


def usual_course(diagnosis: Diagnosis, number: int) -> Course:
    """The same at every visit; progressive MCI turns into dementia after 1 to 3 years."""
    conversion = (12, 24, 36)[number % 3]
    words = {"NC": "NC", "AD": "AD", "sMCI": "MCI", "pMCI": "MCI"}
    visits = tuple(
        (months, "AD" if diagnosis == "pMCI" and months >= conversion else words[diagnosis])
        for months in _MONTHS
    )
    return Course(visits, diagnosis)


def course(text: str, expected: str) -> Course:
    """``MCI 0 12, AD 24`` as a course."""
    visits = []
    for run in text.split(","):
        dx, *months = run.split()
        visits += [(int(month), dx) for month in months]
    return Course(tuple(visits), expected)


COURSES = (
    course("MCI 0 12 24 36 48", "sMCI"),
    course("MCI 0 12, AD 24 36", "pMCI"),
    course("MCI 0 12 24 36, AD 48", "converts_after_horizon"),
    course("MCI 0 6 12", "short_follow_up"),
    course("MCI 0 24, AD 48", "interval_censored"),
    course("MCI 0, AD 12, MCI 24 36", "unstable"),
    course("MCI 0, NC 12 24 36", "reverted"),
    course("MCI 0, NC 6, MCI 12 24, NC 36, AD 72", "unstable"),
    course("MCI 0", "short_follow_up"),
)
