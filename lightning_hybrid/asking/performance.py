"""The generic performance model: predicts the time of a step, fitted to timings alone.

**A reconstruction.** Kavarakuntla et al. 2024 (IEEE Access 12:8207) describe one expression with
intrinsic factors (what is computed) and extrinsic ones (how it is spread), whose constants are
found by differential evolution of a regularised cost. The expression, the factors and the
regulariser are in a text that we could not read. This is a version that agrees with the abstract::

    T = c + (sum_i a_i I_i^p_i) prod_j E_j^q_j              a_i, c >= 0
    J = mean_n ((T_n - T_n,measured) / T_n,measured)^2  +  strength * R
    R = sum_i mean_n(a_i I_in^p_i)  +  sum_j |q_j|

Every factor is divided by its geometric mean and T by the mean measured time, so that all a_i have
one scale. The regulariser R adds up what each intrinsic factor contributes on average (a small a_i
with a high power may contribute much) and the exponents of the extrinsic ones. It drives those of
factors that explain nothing to zero, if it is strong enough for the noise; without it
(`strength=0`) they fit the noise. A factor that does not vary cannot be told from c: it is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
from scipy.optimize import differential_evolution, least_squares, minimize

from lightning_hybrid.allocation import Floats
from lightning_hybrid.errors import PlanError

VERSION = 1
"""Version of the JSON format."""
_POWERS = (0.0, 3.0)
_EXPONENTS = (-3.0, 3.0)
_NEGLIGIBLE = 0.01
"""A factor with less than this fraction of the time, or a smaller exponent, does not matter."""


@dataclass(frozen=True, kw_only=True)
class Intrinsic:
    """A factor of what is computed, such as FLOPs: it adds `weight (value / scale)^power`.

    Attributes:
        name: key of its value in a run.
        unit: unit of its values, for the description.
        scale: geometric mean of the values that it was fitted to, in this unit.
        weight: what it adds at `scale`, as a fraction of the mean measured time.
        power: exponent of `value / scale`.
    """

    name: str
    unit: str
    scale: float
    weight: float
    power: float


@dataclass(frozen=True, kw_only=True)
class Extrinsic:
    """A factor of how a run is spread, such as the number of devices.

    It multiplies the sum of the intrinsic factors by `(value / scale)^exponent`.

    Attributes:
        name: key of its value in a run.
        unit: unit of its values, for the description.
        scale: geometric mean of the values that it was fitted to, in this unit.
        exponent: exponent of `value / scale`; if it is negative, more of it takes less time.
    """

    name: str
    unit: str
    scale: float
    exponent: float


@dataclass(frozen=True, kw_only=True)
class PerformanceModel:
    """The fitted expression. Times are in seconds.

    Attributes:
        mean_s: mean of the measured times that it was fitted to.
        constant: fraction of `mean_s` that depends on no factor.
        intrinsic: factors that add up.
        extrinsic: factors that multiply this sum.
        strength: weight of the regulariser in the fit; 0: none.
        error: mean absolute relative error on the runs that it was fitted to.
        version: version of the JSON format.
    """

    mean_s: float
    constant: float
    intrinsic: tuple[Intrinsic, ...]
    extrinsic: tuple[Extrinsic, ...]
    strength: float
    error: float
    version: int = VERSION

    def predict_s(self, run: Mapping[str, float]) -> float:
        """Predict the seconds of a step from factors by name, in the units of the fit.

        Raises:
            PlanError: a factor is missing, or not a finite number of more than 0.
        """
        names = [f.name for f in self.intrinsic] + [f.name for f in self.extrinsic]
        values = dict(zip(names, _table([run], names)[0]))
        work = sum(f.weight * (values[f.name] / f.scale) ** f.power for f in self.intrinsic)
        spread = np.prod([(values[f.name] / f.scale) ** f.exponent for f in self.extrinsic])
        return float(self.mean_s * (self.constant + work * spread))

    def error_on(self, runs: Sequence[Mapping[str, float]], times_s: Sequence[float]) -> float:
        """Mean absolute relative error on given runs, such as those held out of the fit."""
        predicted = np.array([self.predict_s(run) for run in runs])
        return float(np.mean(np.abs(predicted / np.asarray(times_s) - 1)))

    def describe(self) -> str:
        """A text on how much each factor matters, the most important first."""
        lines = [
            f"A step takes {self.mean_s:.3g} s on average; the model is off by {self.error:.1%}."
        ]
        for factor in sorted(self.intrinsic, key=lambda f: -f.weight):
            if factor.weight < _NEGLIGIBLE:
                lines.append(f"{factor.name} does not matter ({factor.weight:.1%} of the time).")
                continue
            lines.append(
                f"{factor.name} accounts for {factor.weight:.0%} of the time, which grows with its "
                f"power {factor.power:.2f}: twice as many {factor.unit} take "
                f"{2**factor.power:.2f} times as long there."
            )
        for spread in sorted(self.extrinsic, key=lambda f: -abs(f.exponent)):
            if abs(spread.exponent) < _NEGLIGIBLE:
                lines.append(f"{spread.name} does not matter (exponent {spread.exponent:.3f}).")
                continue
            lines.append(
                f"Twice as much of {spread.name} ({spread.unit}) multiplies what depends on "
                f"factors by {2**spread.exponent:.2f}."
            )
        lines.append(f"{self.constant:.0%} of the time depends on none of them.")
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a model.

        Raises:
            PlanError: the text is no JSON object, or has other fields than a model of this version.
        """
        try:
            record = json.loads(text)
            if record.get("version") != VERSION:
                raise PlanError(
                    f"the performance model has format version {record.get('version')}, this "
                    f"package reads {VERSION}: fit it anew"
                )
            intrinsic = tuple(Intrinsic(**factor) for factor in record["intrinsic"])
            extrinsic = tuple(Extrinsic(**factor) for factor in record["extrinsic"])
            return cls(**{**record, "intrinsic": intrinsic, "extrinsic": extrinsic})
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            known = ", ".join(field.name for field in fields(cls))
            raise PlanError(
                f"this is no performance model ({error}): a JSON object with {known} is needed"
            ) from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a model from a file.

        Raises:
            PlanError: the file cannot be read, or `from_json` refuses it.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(
                f"no performance model can be read from {str(path)!r}: {error}"
            ) from error


def fit(
    runs: Sequence[Mapping[str, float]],
    times_s: Sequence[float],
    *,
    intrinsic: Mapping[str, str],
    extrinsic: Mapping[str, str],
    strength: float = 1e-3,
    generations: int = 300,
    seed: int = 0,
) -> PerformanceModel:
    """Fit the constants of the model to measured runs.

    Args:
        runs: Values of the factors of each run, by name; all more than 0.
        times_s: Measured seconds of each run.
        intrinsic: Names of the intrinsic factors, each with its unit.
        extrinsic: Names of the extrinsic factors, each with its unit.
        strength: Weight of the regulariser; 0: none.
        generations: Most generations of the differential evolution; a local search follows.
        seed: Seed of the differential evolution.

    Raises:
        PlanError: there are fewer runs than constants, a factor is missing, not positive, or the
            same in all runs, or a time is not positive.
    """
    names = [*intrinsic, *extrinsic]
    values, measured = _table(runs, names), _times(times_s, len(runs))
    constants = 1 + 2 * len(intrinsic) + len(extrinsic)
    if not intrinsic or len(runs) < constants:
        raise PlanError(
            f"{len(runs)} runs cannot fix the {constants} constants of {len(intrinsic)} intrinsic "
            f"and {len(extrinsic)} extrinsic factors: measure more runs, or name fewer factors "
            "(and one intrinsic at least)"
        )
    scales = np.exp(np.log(values).mean(axis=0))
    mean_s = float(measured.mean())
    expression = _Expression(np.log(values / scales), measured / mean_s, len(intrinsic), strength)
    for name, column in zip(names, expression.logs.T):
        if np.ptp(column) < 1e-9:
            raise PlanError(
                f"factor {name!r} is the same in all runs: what it does cannot be told from the "
                "constant; vary it or leave it out"
            )
    best = expression.fitted(generations, seed)
    weights, powers, exponents = expression.split(best)
    return PerformanceModel(
        mean_s=mean_s,
        constant=float(best[0]),
        intrinsic=tuple(
            Intrinsic(name=name, unit=unit, scale=float(s), weight=float(a), power=float(p))
            for (name, unit), s, a, p in zip(intrinsic.items(), scales, weights, powers)
        ),
        extrinsic=tuple(
            Extrinsic(name=name, unit=unit, scale=float(s), exponent=float(q))
            for (name, unit), s, q in zip(extrinsic.items(), scales[len(intrinsic) :], exponents)
        ),
        strength=strength,
        error=float(np.mean(np.abs(expression.times(best) / expression.measured - 1))),
    )


class _Expression:
    """The expression with all factors and times scaled, and the fit of its constants.

    The constants are one vector (c, a_1.., p_1.., q_1..).

    Args:
        logs: (N, factors) logarithms of the scaled factors, the intrinsic ones first.
        measured: (N,) measured times by their mean.
        intrinsic: number of intrinsic factors.
        strength: weight of the regulariser.
    """

    def __init__(self, logs: Floats, measured: Floats, intrinsic: int, strength: float) -> None:
        self.logs, self.measured, self.count, self.strength = logs, measured, intrinsic, strength
        most = 3 * float(measured.max())
        extrinsic = logs.shape[1] - intrinsic
        self.bounds = [(0.0, most)] * (1 + intrinsic)
        self.bounds += [_POWERS] * intrinsic + [_EXPONENTS] * extrinsic

    def split(self, constants: Floats) -> tuple[Floats, Floats, Floats]:
        k = self.count
        return constants[1 : 1 + k], constants[1 + k : 1 + 2 * k], constants[1 + 2 * k :]

    def times(self, constants: Floats) -> Floats:
        weights, powers, exponents = self.split(constants)
        work = np.exp(self.logs[:, : self.count] * powers) @ weights
        return np.asarray(constants[0] + work * np.exp(self.logs[:, self.count :] @ exponents))

    def errors(self, constants: Floats) -> Floats:
        return np.asarray(self.times(constants) / self.measured - 1)

    def cost(self, constants: Floats) -> float:
        weights, powers, exponents = self.split(constants)
        error = self.errors(constants)
        added = np.exp(self.logs[:, : self.count] * powers).mean(axis=0) * weights
        penalty = added.sum() + np.abs(exponents).sum()
        return float(np.mean(error**2) + self.strength * penalty)

    def fitted(self, generations: int, seed: int) -> Floats:
        found = differential_evolution(
            self.cost,
            self.bounds,
            seed=seed,
            maxiter=generations,
            popsize=12,
            tol=1e-10,
            polish=False,
        )
        polished = minimize(
            self.cost,
            found.x,
            bounds=self.bounds,
            method="L-BFGS-B",
            options={"maxiter": 5_000, "ftol": 1e-16, "gtol": 1e-12},
        )
        best = np.asarray(min((found, polished), key=lambda answer: answer.fun).x)
        return best if self.strength else self.squared(best)

    def squared(self, start: Floats) -> Floats:
        """Improve constants by least squares, which is for a fit without regulariser.

        Weights and powers can replace each other with hardly a change of the cost, so that general
        methods end early; least squares, which has each error by itself, goes on.
        """
        low, high = np.array(self.bounds).T
        found = least_squares(
            self.errors, np.clip(start, low, high), bounds=(low, high), x_scale="jac",
            ftol=1e-15, xtol=1e-15, gtol=1e-15, max_nfev=1_000,
        )  # fmt: skip
        return np.asarray(min((start, found.x), key=self.cost))


def _table(runs: Sequence[Mapping[str, float]], names: Sequence[str]) -> Floats:
    """The factors of these names as a table with a row per run, checked to be positive."""
    table = np.empty((len(runs), len(names)))
    for number, run in enumerate(runs):
        for column, name in enumerate(names):
            if name not in run:
                raise PlanError(
                    f"run {number} lacks the factor {name!r} (it has {', '.join(run) or 'none'})"
                )
            table[number, column] = value = run[name]
            if not 0 < value < np.inf:
                raise PlanError(
                    f"{name} of run {number} is {value}: a finite number of more than 0 is needed"
                )
    return table


def _times(times_s: Sequence[float], count: int) -> Floats:
    times = np.asarray(times_s, dtype=np.float64)
    if times.shape != (count,):
        raise PlanError(f"there are {count} runs and {times.size} times: one for each is needed")
    for number, time in enumerate(times):
        if not 0 < time < np.inf:
            raise PlanError(f"time {number} is {time}: a finite number of more than 0 is needed")
    return times
