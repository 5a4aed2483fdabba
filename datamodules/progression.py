"""From a subject's diagnoses over time to the class of one scan.

The rule looks at the whole history, before any scan is chosen, and answers with a class or with the
reason why there is none:

* NC: normal at every visit.
* AD: demented at the scan and at every later visit (see ``LabelRule`` for other readings).
* pMCI: MCI at the scan, demented within the horizon and ever after, never normal in between.
* sMCI: MCI at the scan, never demented, never normal after it, and still MCI at a visit at or
  beyond the horizon.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import pairwise
from typing import Literal

from .errors import DataError

DAYS_PER_MONTH = 30.4375
FORGOTTEN = date(1900, 1, 1)
"""Where visits without a date are counted from."""
OTHER_DEMENTIA = "--data.other_dementia / --other-dementia says what they are"


@dataclass(frozen=True)
class LabelRule:
    """What is left to choose in the rule; it is written into the split file.

    Attributes:
        horizon_months: conversion within this time makes progressive MCI.
        tolerance_months: by how much a visit may miss the horizon, as people come early and late.
        max_days_apart: a scan without a diagnosis this near has none.
        late_converters: what those are who convert after the horizon and were still MCI there.
        smc: whether people with memory complaints and normal tests (SMC) are controls.
        ad: whether every scan at which somebody is demented is one of AD, or only those of people
            who were demented at their first visit.
        reverters: what scans are of people who were demented once and not at a later visit:
            nothing, or what was diagnosed at the visit.
        gaps: whether a visit without a diagnosis between two visits with the same one has that one.
        other_dementia: what people are whose dementia has another cause, where the table says it
            (``OD``; DXDDUE of DXSUM, form D1): nothing, or demented like the others.
    """

    horizon_months: float = 36.0
    tolerance_months: float = 3.0
    max_days_apart: int = 60
    late_converters: Literal["exclude", "stable"] = "exclude"
    smc: Literal["exclude", "normal"] = "exclude"
    ad: Literal["ever", "baseline"] = "ever"
    reverters: Literal["exclude", "visit"] = "exclude"
    gaps: Literal["leave", "fill"] = "leave"
    other_dementia: Literal["exclude", "ad"] = "exclude"

    @property
    def meant(self) -> dict[str, str]:
        """Diagnoses that are taken for others."""
        found = {"SMC": "NC"} if self.smc == "normal" else {}
        return found | ({"OD": "AD"} if self.other_dementia == "ad" else {})

    def __post_init__(self) -> None:
        if not (self.horizon_months > self.tolerance_months >= 0 and self.max_days_apart >= 0):
            raise DataError(
                "BAD_RULE",
                f"horizon {self.horizon_months}, tolerance {self.tolerance_months} months, "
                f"{self.max_days_apart} days apart",
                action="the horizon must be longer than the tolerance, none may be negative",
            )


@dataclass(frozen=True)
class Visit:
    """One visit in the clinic.

    Attributes:
        day: the date; when not ``dated``, only distances between days mean something.
        dx: NC, SMC, MCI or AD; OD for a dementia of another cause, other for an impairment that is
            none of these; empty when not known.
        session: M and the month (``M012``), or empty.
        age: years.
        mmse: mini-mental state, 0 to 30.
        cdr_sb: clinical dementia rating, sum of boxes, 0 to 18.
        phase: ADNI1, ADNIGO, ADNI2, ADNI3 or ADNI4, as the table writes it.
        field_strength: tesla.
        dated: whether ``day`` is a date of the calendar.
        timed: whether distances between days mean something; if not, only their order does.
    """

    day: date
    dx: str
    session: str = ""
    age: float | None = None
    mmse: float | None = None
    cdr_sb: float | None = None
    phase: str = ""
    field_strength: float | None = None
    dated: bool = True
    timed: bool = True


def filled(visits: Sequence[Visit]) -> list[Visit]:
    """The visits in order of time, gaps between two equal diagnoses filled with that diagnosis."""
    ordered = sorted(visits, key=lambda visit: visit.day)
    known = [number for number, visit in enumerate(ordered) if visit.dx]
    for before, after in pairwise(known):
        dx = ordered[before].dx
        if ordered[after].dx == dx:
            for number in range(before + 1, after):
                ordered[number] = replace(ordered[number], dx=dx)
    return ordered


def visit_of_scan(
    visits: Sequence[Visit], day: date | None, session: str, max_days_apart: int
) -> Visit | None:
    """The visit with a diagnosis that a scan belongs to.

    By date when both have one, since no image is keyed by a visit code; by the day since a start
    that is not known, where sessions count days (``d0129``); else by the session.
    """
    known = [visit for visit in visits if visit.dx]
    dated = any(visit.dated for visit in known)
    if day is None and not dated and re.fullmatch(r"d\d+", session):
        day = nominal_day(session)
        known = [visit for visit in known if visit.session[:1] == "d"]
        dated = bool(known)
    if day is not None and dated:
        # of two as near the earlier one, and never the one that stands first in a table
        near = min(known, key=lambda visit: (abs((visit.day - day).days), visit.day, repr(visit)))
        return near if abs((near.day - day).days) <= max_days_apart else None
    same = [visit for visit in known if session and visit.session == session]
    return min(same, key=lambda visit: (visit.day, repr(visit)), default=None)


def nominal_day(session: str) -> date | None:
    """The day that a session names, by month (``M012``) or by day (``d0129``); None for others."""
    if match := re.fullmatch(r"M(\d+)", session):
        return FORGOTTEN + timedelta(days=round(int(match[1]) * DAYS_PER_MONTH))
    if match := re.fullmatch(r"d(\d+)", session):
        return FORGOTTEN + timedelta(days=int(match[1]))
    return None


def label_visit(
    history: Sequence[Visit], near: Visit, rule: LabelRule | None = None
) -> tuple[str, str]:
    """(class, reason) of a scan taken at the visit ``near`` of ``history``: one of them is empty.

    Reasons: ``smc``, ``other_dementia`` (at any visit), ``reverted``, ``unstable`` (also: two
    diagnoses on one day), ``short_follow_up``, ``interval_censored`` (converted between two visits
    around the horizon), ``converts_after_horizon``, ``other_diagnosis`` (impaired, and neither MCI
    nor demented), ``demented_later`` (AD, but not at the first visit, where that is asked for),
    ``no_dates`` (MCI, and sessions that name no time).
    """
    rule = rule or LabelRule()
    meant = rule.meant
    near = replace(near, dx=meant.get(near.dx, near.dx))
    seen = [replace(visit, dx=meant.get(visit.dx, visit.dx)) for visit in history if visit.dx]
    visits = sorted(seen, key=lambda visit: visit.day)
    if any(visit.dx == "OD" for visit in visits):
        return "", "other_dementia"
    if len({(visit.day, visit.dx) for visit in visits}) > len({visit.day for visit in visits}):
        return "", "unstable"
    return _label_among(visits, near, rule)


def _label_among(visits: Sequence[Visit], near: Visit, rule: LabelRule) -> tuple[str, str]:
    """Likewise, of visits in order of time with one diagnosis a day."""
    later = [visit for visit in visits if visit.day > near.day]
    if near.dx == "AD":
        stays = all(visit.dx == "AD" for visit in later)
        if not stays and rule.reverters == "exclude":
            return "", "reverted"
        if rule.ad == "baseline" and visits[0].dx != "AD":
            return "", "demented_later"
        return "AD", ""
    if near.dx == "NC":
        return ("NC", "") if all(visit.dx == "NC" for visit in visits) else ("", "unstable")
    if near.dx in ("SMC", "other"):
        return "", "smc" if near.dx == "SMC" else "other_diagnosis"
    if any(visit.dx == "AD" for visit in visits if visit.day < near.day):
        return "", "unstable"
    return _label_mci(near, later, rule) if near.timed else ("", "no_dates")


def _label_mci(scan: Visit, later: Sequence[Visit], rule: LabelRule) -> tuple[str, str]:
    def months(visit: Visit) -> float:
        return (visit.day - scan.day).days / DAYS_PER_MONTH

    still = [visit for visit in later if visit.dx != "AD"]
    converted = bool(later) and later[-1].dx == "AD"
    if any(visit.dx != "MCI" for visit in still):
        ever_ad = any(visit.dx == "AD" for visit in later)
        return "", "unstable" if ever_ad else "reverted"
    last_mci = max((months(visit) for visit in still), default=0.0)
    long_enough = last_mci >= rule.horizon_months - rule.tolerance_months
    if not converted:
        if len(still) < len(later):  # demented once, and not any more
            return "", "unstable"
        return ("sMCI", "") if long_enough else ("", "short_follow_up")
    conversion = min(months(v) for v in later if v.dx == "AD" and months(v) > last_mci)
    # who was still seen with MCI at the horizon did not convert before it, whatever the tolerance
    late = conversion > rule.horizon_months + rule.tolerance_months
    if not late and last_mci < rule.horizon_months:
        return "pMCI", ""
    if not long_enough:
        return "", "interval_censored"
    stable = rule.late_converters == "stable"
    return ("sMCI", "") if stable else ("", "converts_after_horizon")
