"""From a subject's diagnoses over time to the class of one scan.

The rule looks at the whole history, before any scan is chosen, and answers with a class or with the
reason why there is none:

* NC: normal at every visit.
* AD: demented at the scan and at every later visit.
* pMCI: MCI at the scan, demented within the horizon and ever after, never normal in between.
* sMCI: MCI at the scan, never demented, never normal after it, and still MCI at a visit at or
  beyond the horizon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

_HORIZON_MONTHS = 36.0  # conversion within this time makes progressive MCI
_TOLERANCE_MONTHS = 3.0  # visits happen early and late
_MAX_DAYS_APART = 60  # a scan without a diagnosis this near has none
_DAYS_PER_MONTH = 30.4375


@dataclass(frozen=True)
class Visit:
    """A diagnosis (NC, SMC, MCI or AD) on a day."""

    day: date
    dx: str


def label_scan(history: Sequence[Visit], scan: date) -> tuple[str, str]:
    """(class, reason): one of them is empty.

    Reasons: ``no_dx_near_scan``, ``smc``, ``reverted``, ``unstable``, ``short_follow_up``,
    ``interval_censored`` (converted between two visits around the horizon),
    ``converts_after_horizon``.
    """
    visits = sorted(history, key=lambda visit: visit.day)
    near = min(visits, key=lambda visit: abs((visit.day - scan).days), default=None)
    if near is None or abs((near.day - scan).days) > _MAX_DAYS_APART:
        return "", "no_dx_near_scan"
    later = [visit for visit in visits if visit.day > near.day]
    if near.dx == "AD":
        return ("AD", "") if all(visit.dx == "AD" for visit in later) else ("", "reverted")
    if near.dx == "NC":
        return ("NC", "") if all(visit.dx == "NC" for visit in visits) else ("", "unstable")
    if near.dx == "SMC":
        return "", "smc"
    if any(visit.dx == "AD" for visit in visits if visit.day < near.day):
        return "", "unstable"
    return _label_mci(near, later)


def _label_mci(scan: Visit, later: Sequence[Visit]) -> tuple[str, str]:
    def months(visit: Visit) -> float:
        return (visit.day - scan.day).days / _DAYS_PER_MONTH

    still = [visit for visit in later if visit.dx != "AD"]
    converted = bool(later) and later[-1].dx == "AD"
    if any(visit.dx != "MCI" for visit in still):
        ever_ad = any(visit.dx == "AD" for visit in later)
        return "", "unstable" if ever_ad else "reverted"
    last_mci = max((months(visit) for visit in still), default=0.0)
    long_enough = last_mci >= _HORIZON_MONTHS - _TOLERANCE_MONTHS
    if not converted:
        if len(still) < len(later):  # demented once, and not any more
            return "", "unstable"
        return ("sMCI", "") if long_enough else ("", "short_follow_up")
    conversion = min(months(v) for v in later if v.dx == "AD" and months(v) > last_mci)
    if conversion <= _HORIZON_MONTHS + _TOLERANCE_MONTHS:
        return "pMCI", ""
    return "", "converts_after_horizon" if long_enough else "interval_censored"
