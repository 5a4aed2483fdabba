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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
from scipy.optimize import differential_evolution, least_squares, minimize

from lightning_hybrid.allocation import Floats
from lightning_hybrid.errors import PlanError

VERSION = 2
"""Version of the JSON format."""
_POWERS = (0.0, 3.0)
_EXPONENTS = (-3.0, 3.0)
_NEGLIGIBLE = 0.01
"""An intrinsic factor with less than this fraction of the time, or an extrinsic factor with a
smaller exponent, is said not to matter."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A factor of the time of a step, which counts as `weight * (value / scale)^power`.

    Attributes:
        name: key of the factor's value in a run.
        scale: geometric mean of the values to which the model was fitted.
        power: the exponent. If that of an extrinsic factor is negative, more of it takes less time.
        weight: what an intrinsic factor adds if its value is `scale`, as a fraction of the mean
            measured time; 1 for extrinsic factors.
    """

    name: str
    scale: float
    power: float
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PerformanceModel:
    """A fitted model, which predicts the seconds of a step from factors of a run.

    Attributes:
        mean_s: mean of the measured seconds to which it was fitted.
        constant: fraction of `mean_s` that depends on no factor.
        intrinsic: factors of what is computed, such as FLOPs; their contributions are added.
        extrinsic: factors of how a run is spread, such as the number of devices; the sum of the
            intrinsic contributions is multiplied by theirs.
        strength: weight of the regulariser in the fit; 0: none.
        error: mean absolute relative error on the runs to which it was fitted.
        version: version of the JSON format.
    """

    mean_s: float
    constant: float
    intrinsic: tuple[Factor, ...]
    extrinsic: tuple[Factor, ...]
    strength: float
    error: float
    version: int = VERSION

    def predict_s(self, run: Mapping[str, float]) -> float:
        """Predict the seconds of a step.

        Args:
            run: the values of all factors by name, in the units of the fit.

        Raises:
            PlanError: a factor is missing, or not a finite number of more than 0.
        """
        factors = (*self.intrinsic, *self.extrinsic)
        values = _table([run], [factor.name for factor in factors])[0]
        # of an intrinsic factor its share of the time, of an extrinsic one a multiple
        parts = [f.weight * (value / f.scale) ** f.power for f, value in zip(factors, values)]
        count = len(self.intrinsic)
        return float(self.mean_s * (self.constant + sum(parts[:count]) * np.prod(parts[count:])))

    def error_on(self, runs: Sequence[Mapping[str, float]], times_s: Sequence[float]) -> float:
        """Compute the mean absolute relative error of predictions, for instance for other runs.

        Args:
            runs: for each run the values of all factors, by name.
            times_s: measured seconds of a step of each run.

        Raises:
            PlanError: a factor is missing, or not a finite number of more than 0.
        """
        predicted = np.array([self.predict_s(run) for run in runs])
        return float(np.mean(np.abs(predicted / np.asarray(times_s) - 1)))

    def describe(self) -> str:
        """Return a text for the user on how much each factor matters, the most important first."""
        lines = [
            f"A step takes {self.mean_s:.3g} s on average; the model is off by {self.error:.1%}."
        ]
        for factor in sorted(self.intrinsic, key=lambda f: -f.weight):
            if factor.weight < _NEGLIGIBLE:
                lines.append(f"{factor.name} does not matter ({factor.weight:.1%} of the time).")
                continue
            lines.append(
                f"{factor.name} accounts for {factor.weight:.0%} of the time, which grows with its "
                f"power {factor.power:.2f}: twice as much takes {2**factor.power:.2f} times as "
                "long there."
            )
        for factor in sorted(self.extrinsic, key=lambda f: -abs(f.power)):
            if abs(factor.power) < _NEGLIGIBLE:
                lines.append(f"{factor.name} does not matter (exponent {factor.power:.3f}).")
                continue
            lines.append(
                f"Twice as much of {factor.name} multiplies what depends on factors by "
                f"{2**factor.power:.2f}."
            )
        lines.append(f"{self.constant:.0%} of the time depends on none of them.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the model as JSON text, which :meth:`load` reads from a file."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a model that ``fit-model --out`` or `to_json` has written, for a script of your own.

        Args:
            path: the file.

        Raises:
            PlanError: the file cannot be read, is no JSON object, or has other fields than a model
                of this version.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            if record["version"] != VERSION:
                raise ValueError(f"it has version {record['version']}, not {VERSION}")
            factors = {
                kind: tuple(Factor(**factor) for factor in record[kind])
                for kind in ("intrinsic", "extrinsic")
            }
            return cls(**(record | factors))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"no performance model can be read from {str(path)!r} ({error}): fit it anew"
            ) from error


def fit(
    runs: Sequence[Mapping[str, float]],
    times_s: Sequence[float],
    *,
    intrinsic: Collection[str],
    extrinsic: Collection[str],
    strength: float = 1e-3,
    generations: int = 300,
    seed: int = 0,
) -> PerformanceModel:
    """Fit the constants of the model to measured runs.

    Args:
        runs: Values of the factors of each run, by name; all more than 0.
        times_s: Measured seconds of a step of each run.
        intrinsic: Names of the intrinsic factors, one at least.
        extrinsic: Names of the extrinsic factors.
        strength: Weight of the regulariser; 0: none.
        generations: Most generations of the differential evolution; a local search follows.
        seed: Seed of the differential evolution.

    Raises:
        PlanError: there are fewer runs than constants of the model; a factor is missing, not
            positive, or the same in all runs; a time is not positive; or there is not one time for
            each run.
    """
    names = [*intrinsic, *extrinsic]
    if len(times_s) != len(runs):
        raise PlanError(
            f"there are {len(runs)} runs and {len(times_s)} times: one for each is needed"
        )
    values, measured = _table(runs, names), _table([{"time": t} for t in times_s], ["time"])[:, 0]
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
            Factor(name=name, scale=float(s), power=float(p), weight=float(a))
            for name, s, p, a in zip(intrinsic, scales, powers, weights)
        ),
        extrinsic=tuple(
            Factor(name=name, scale=float(s), power=float(q))
            for name, s, q in zip(extrinsic, scales[len(intrinsic) :], exponents)
        ),
        strength=strength,
        error=float(np.mean(np.abs(expression.times(best) / expression.measured - 1))),
    )


class _Expression:
    """The expression of the model for scaled factors and times, and the fit of its constants.

    The constants are one vector (c, a_1.., p_1.., q_1..), with the names of the module's docstring.

    Args:
        logs: (N, factors) logarithms of the scaled factors in N runs, the intrinsic ones first.
        measured: (N,) measured times, divided by their mean.
        intrinsic: number of intrinsic factors.
        strength: weight of the regulariser.
    """

    def __init__(self, logs: Floats, measured: Floats, intrinsic: int, strength: float) -> None:
        self.logs = logs
        self.measured = measured
        self.count = intrinsic
        self.strength = strength
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
        if self.strength:
            polished = minimize(
                self.cost,
                found.x,
                bounds=self.bounds,
                method="L-BFGS-B",
                options={"maxiter": 5_000, "ftol": 1e-16, "gtol": 1e-12},
            )
        else:
            # Without a regulariser weights and powers can replace each other with hardly a change
            # of the cost, where general methods end early; least squares, which has each error by
            # itself, goes on.
            low, high = np.array(self.bounds).T
            polished = least_squares(
                self.errors, np.clip(found.x, low, high), bounds=(low, high), x_scale="jac",
                ftol=1e-15, xtol=1e-15, gtol=1e-15, max_nfev=1_000,
            )  # fmt: skip
        return np.asarray(min((found.x, polished.x), key=self.cost))


def _table(runs: Sequence[Mapping[str, float]], names: Sequence[str]) -> Floats:
    """Make an array of the factors of runs, with a row per run and a column per name.

    Args:
        runs: for each run the values of its factors, by name; other values may be among them.
        names: names of the factors to take.

    Raises:
        PlanError: a factor is missing, or not a finite number of more than 0.
    """
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
