"""How well numbers that were told fit the true ones, and how sure one can be of it.

Shapes: ``told`` (n,) and ``true`` (n,), in the units of the number. Intervals are of a bootstrap of
people with bias correction and acceleration (BCa): two scans of a person are nearly one. From how
many people on they are given is decided by ``benchmarks/interval_coverage.py``.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import norm, ttest_rel

from models.metrics import LEVEL, Array

FEWEST = 50
"""People below which mean absolute error and bias have no interval."""
_ALIKE = 0.2  # share of the spread of true numbers
FEWEST_OF_FIT = 100
"""Likewise of the others, which few people far from the mean decide."""
_DRAWS = 1000
_OF_FIT = ("rmse", "r2", "pearson_r", "bias_slope")


def evaluate(told: Array, true: Array) -> dict[str, float]:
    """All metrics; a value that the data leave undefined is NaN.

    ``bias`` is the mean of told minus true, ``bias_slope`` how it changes with the true number: a
    network that tells the mean of everybody has one of -1.
    """
    return {name: float(value) for name, value in _metrics(_sums(told, true).sum(axis=0)).items()}


def intervals(
    told: Array, true: Array, subjects: Sequence[str], seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Intervals (low, high) of the metrics that have one with so many people.

    Args:
        told: (n,).
        true: (n,).
        subjects: whose scan each is.
        seed: of the bootstrap.
    """
    _, person = np.unique(np.asarray(subjects), return_inverse=True)
    people = person.max(initial=-1) + 1
    if people < FEWEST:
        return {}
    sums = np.zeros((people, 8))
    np.add.at(sums, person, _sums(told, true))
    # how often each person is drawn, instead of whom: all metrics are of sums
    counts = np.random.default_rng(seed).multinomial(people, np.full(people, 1 / people), _DRAWS)
    found, drawn, without = (
        _metrics(of) for of in (sums.sum(axis=0), counts @ sums, sums.sum(axis=0) - sums)
    )
    names = [name for name in found if people >= FEWEST_OF_FIT or name not in _OF_FIT]
    ends = {name: _bca(float(found[name]), drawn[name], without[name]) for name in names}
    return {name: pair for name, pair in ends.items() if not np.isnan(pair).any()}


def hardly_differ(told: Array, true: Array, name: str) -> str:
    """A sentence about numbers (n,) that are nearly one; empty where people are told apart."""
    if len(told) < 2 or np.std(told) >= _ALIKE * np.std(true):
        return ""
    ends = [f"{min(values):.1f} to {max(values):.1f}" for values in (told, true)]
    return (
        f"The network tells everybody nearly the same {name}, {ends[0]}, and they have {ends[1]}: "
        "it has not learnt to tell people apart."
    )


def _sums(told: Array, true: Array) -> Array:
    """What all metrics are made of, (n, 8): of each scan."""
    off = np.asarray(told, dtype=float) - true
    one = np.ones_like(off)
    columns = (one, np.abs(off), off, off**2, true, true**2, off * true, np.square(told))
    return np.stack(columns, axis=1)


def _metrics(sums: Array) -> dict[str, Array]:
    """Metrics of sums (..., 8) over scans."""
    n, distance, off, square, true, true_square, both, told_square = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = true_square / n - (true / n) ** 2
        spread = np.where(spread > 1e-12, spread, np.nan)
        shared = both / n - off * true / n**2  # covariance of the error and the true number
        told_spread = told_square / n - ((off + true) / n) ** 2
        return {
            "mae": distance / n,
            "rmse": np.sqrt(square / n),
            "r2": 1 - square / n / spread,
            "pearson_r": (shared + spread)
            / np.sqrt(spread * np.where(told_spread > 1e-12, told_spread, np.nan)),
            "bias": off / n,
            "bias_slope": shared / spread,
        }


def _bca(found: float, drawn: Array, without: Array) -> tuple[float, float]:
    """Ends of a BCa interval (Efron 1987), from draws and the values without each person."""
    below = float(np.mean(drawn < found) + np.mean(drawn == found) / 2)
    off = without.mean() - without
    scale = float((off**2).sum()) ** 1.5
    if not 0 < below < 1 or not scale or np.isnan(drawn).any():
        return float("nan"), float("nan")
    shift, skew = norm.ppf(below), float((off**3).sum()) / (6 * scale)
    z = shift + norm.ppf([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    low, high = np.quantile(drawn, norm.cdf(shift + z / (1 - skew * z)))
    return float(low), float(high)


class Compared(NamedTuple):
    """Two that told the same people's number.

    Attributes:
        people: how many.
        errors: mean absolute error of each.
        p: p-value of their difference, of a paired t-test; NaN for fewer than two people.
    """

    people: int
    errors: tuple[float, float]
    p: float


def compare(first: Array, second: Array, true: Array) -> Compared:
    """Compare numbers (n,) of two with the true ones (n,), one scan a person."""
    off = [np.abs(told - true) for told in (first, second)]
    errors = float(off[0].mean()), float(off[1].mean())
    gaps = off[0] - off[1]
    if len(gaps) < 2:
        return Compared(len(gaps), errors, float("nan"))
    p = float(ttest_rel(*off).pvalue) if float(np.ptp(gaps)) else float(errors[0] == errors[1])
    return Compared(len(gaps), errors, p)


class Correction(NamedTuple):
    """What a network gets wrong on average, as a line over the true number.

    Networks that tell ages tell the young too old and the old too young; a gap between told and
    true age means something only beyond that (Smith et al., NeuroImage 2019).

    Attributes:
        intercept: of told minus true.
        slope: likewise.
    """

    intercept: float
    slope: float

    def gap(self, told: float, true: float) -> float:
        """Told minus true, without what is told wrong of anybody of this number."""
        return told - true - self.intercept - self.slope * true


def correction(told: Array, true: Array) -> Correction:
    """Fitted to scans that were not trained on."""
    known = evaluate(told, true)
    slope = known["bias_slope"] if np.isfinite(known["bias_slope"]) else 0.0
    return Correction(known["bias"] - slope * float(np.mean(true)), slope)


def as_text(values: Mapping[str, float], unit: str) -> str:
    """``mean error 5.10 years`` and its interval, for a line on the screen."""
    ends = [values.get(f"mae_{end}") for end in ("low", "high")]
    shown = "" if None in ends else f" ({ends[0]:.2f} to {ends[1]:.2f})"
    return f"mean absolute error {values['mae']:.2f}{shown} {unit}"
