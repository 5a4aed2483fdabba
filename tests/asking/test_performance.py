"""The generic performance model finds what timings were made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_hybrid.asking.performance import PerformanceModel, fit
from lightning_hybrid.errors import PlanError

INTRINSIC = ["flops", "bytes"]
EXTRINSIC = ["devices"]


def runs(count: int, seed: int = 0) -> list[dict[str, float]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "flops": float(rng.uniform(1e9, 1e11)),
            "bytes": float(rng.uniform(1e6, 1e8)),
            "colour": float(rng.uniform(1, 9)),
            "devices": float(rng.integers(1, 9)),
        }
        for _ in range(count)
    ]


def true_s(run: dict[str, float]) -> float:
    work = 3e-12 * run["flops"] + 2e-10 * run["bytes"] ** 1.2
    return float(0.02 + work * run["devices"] ** -0.8)


def fitted(measured: list[dict[str, float]], noise: float = 0.0, **changes: Any) -> Any:
    rng = np.random.default_rng(1)
    times = [true_s(run) * float(np.exp(noise * rng.normal())) for run in measured]
    options: dict[str, Any] = {"intrinsic": INTRINSIC, "extrinsic": EXTRINSIC, "strength": 0.0}
    return fit(measured, times, **(options | changes))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.conformance)])
def test_known_constants_are_recovered_within_1_per_cent(seed: int) -> None:
    model = fitted(runs(40, seed), generations=50)
    flops, size = model.intrinsic
    (devices,) = model.extrinsic
    spread = devices.scale**devices.power  # factors are scaled by their means

    def constant(factor: Any) -> float:
        return float(model.mean_s * factor.weight / factor.scale**factor.power / spread)

    assert model.constant * model.mean_s == pytest.approx(0.02, rel=0.01)
    assert flops.power == pytest.approx(1.0, rel=0.01)
    assert size.power == pytest.approx(1.2, rel=0.01)
    assert devices.power == pytest.approx(-0.8, rel=0.01)
    assert constant(flops) == pytest.approx(3e-12, rel=0.01)
    assert constant(size) == pytest.approx(2e-10, rel=0.01)
    others = runs(20, seed=5)
    assert model.error_on(others, [true_s(run) for run in others]) < 0.01


@pytest.mark.conformance
def test_the_regulariser_drives_irrelevant_factors_to_zero_and_nothing_else_does() -> None:
    measured = [run | {"hour": 1 + run["colour"] * 7 % 5} for run in runs(40)]
    factors = {"intrinsic": [*INTRINSIC, "colour"], "extrinsic": [*EXTRINSIC, "hour"]}
    free, drawn = (
        fitted(measured, noise=0.02, strength=strength, generations=120, **factors)
        for strength in (0.0, 0.03)
    )
    assert free.intrinsic[2].weight > 1e-5
    assert abs(free.extrinsic[1].power) > 1e-3
    assert drawn.intrinsic[2].weight < 1e-9
    assert abs(drawn.extrinsic[1].power) < 1e-6
    for name in ("colour", "hour"):
        assert f"{name} does not matter" in drawn.describe()


@pytest.mark.conformance
def test_it_predicts_other_runs_better_than_their_mean() -> None:
    model = fitted(runs(30), noise=0.05)
    others = runs(20, seed=9)
    times = [true_s(run) for run in others]
    mean = np.mean([true_s(run) for run in runs(30)])
    assert model.error_on(others, times) < 0.1 < np.mean(np.abs(mean / np.array(times) - 1))


@pytest.mark.conformance
def test_it_says_which_factor_matters() -> None:
    text = fitted(runs(40)).describe()
    assert text.index("bytes accounts for") < text.index("flops accounts for")  # 39 and 17 %
    assert "twice as much takes 2.30 times as long" in text
    assert "Twice as much of devices multiplies what depends on factors by 0.57" in text


def test_a_model_survives_a_file(tmp_path: Path) -> None:
    model = fitted(runs(12), generations=5)
    (tmp_path / "model.json").write_text(model.to_json())
    assert PerformanceModel.load(tmp_path / "model.json") == model
    with pytest.raises(PlanError, match=r"nowhere\.json"):
        PerformanceModel.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 2}', '{"version": 9}'])
def test_what_is_no_model_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(PlanError, match=r"no performance model can be read from .*model\.json"):
        PerformanceModel.load(tmp_path / "model.json")


def test_the_same_seed_gives_the_same_model() -> None:
    assert fitted(runs(12), generations=5) == fitted(runs(12), generations=5)


@pytest.mark.parametrize(
    ("changes", "times", "message"),
    [
        ({"intrinsic": ["flops", "size"]}, None, "run 0 lacks the factor 'size'"),
        ({"intrinsic": []}, None, "one intrinsic at least"),
        ({"intrinsic": ["one"]}, None, "'one' is the same in all runs"),
        ({"intrinsic": ["none"]}, None, "none of run 0 is 0"),
        ({}, [1.0], "10 runs and 1 times"),
        ({}, [-1.0] * 10, "time of run 0 is -1"),
    ],
)
def test_what_cannot_be_fitted_is_refused(changes: Any, times: Any, message: str) -> None:
    measured = [run | {"one": 1.0, "none": 0.0} for run in runs(10)]
    options: dict[str, Any] = {"intrinsic": INTRINSIC, "extrinsic": EXTRINSIC} | changes
    with pytest.raises(PlanError, match=message):
        fit(measured, times or [1.0] * 10, **options)


def test_too_few_runs_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match="4 runs cannot fix the 6 constants"):
        fitted(runs(4))
