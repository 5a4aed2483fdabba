"""Metrics, intervals and comparisons of numbers that are told."""

import numpy as np
import pytest
from scipy import stats
from scipy.stats import bootstrap

from models import numbers
from models.predictions import Prediction, read_outputs, table_rows


def drawn(people: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    true = random.normal(70, 8, people)
    return 70 + 0.6 * (true - 70) + random.normal(1, 4, people), true


def plainly(told, true) -> dict[str, float]:
    off, line = told - true, stats.linregress(true, told - true)
    return {
        "mae": np.abs(off).mean(),
        "rmse": np.sqrt((off**2).mean()),
        "r2": 1 - (off**2).sum() / ((true - true.mean()) ** 2).sum(),
        "pearson_r": stats.pearsonr(told, true).statistic,
        "bias": off.mean(),
        "bias_slope": line.slope,
    }


def test_metrics_are_those_of_their_formulas() -> None:
    assert numbers.evaluate(*drawn(40)) == pytest.approx(plainly(*drawn(40)))


def test_a_number_that_is_the_same_for_all_leaves_what_is_relative_to_its_spread_undefined() -> (
    None
):
    found = numbers.evaluate(np.array([1.0, 2.0]), np.array([3.0, 3.0]))
    assert found["mae"] == 1.5
    assert all(np.isnan(found[name]) for name in ("r2", "pearson_r", "bias_slope"))


@pytest.mark.parametrize("name", plainly(*drawn(9)))
def test_intervals_are_those_of_scipys_bootstrap_of_people(name) -> None:
    told, true = drawn(150)
    reference = bootstrap(
        (told, true),
        lambda a, b: plainly(a, b)[name],
        paired=True,
        vectorized=False,
        method="BCa",
        n_resamples=1500,
        rng=np.random.default_rng(1),
    ).confidence_interval
    low, high = numbers.intervals(told, true, [str(n) for n in range(150)])[name]
    width = reference.high - reference.low
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=0.12 * width)


def test_scans_of_one_person_count_as_one() -> None:
    told, true = drawn(120)
    names = [str(n) for n in range(120)]
    once = numbers.intervals(told, true, names)
    thrice = numbers.intervals(np.tile(told, 3), np.tile(true, 3), names * 3)
    assert {n: pytest.approx(ends) for n, ends in once.items()} == thrice


def test_few_people_have_no_interval() -> None:
    for people, known in ((49, set()), (60, {"mae", "bias"})):
        assert set(numbers.intervals(*drawn(people), [str(n) for n in range(people)])) == known


def test_the_corrected_gap_does_not_depend_on_the_number_where_errors_do() -> None:
    told, true = drawn(400)
    line = numbers.correction(told, true)
    gaps = [line.gap(*pair) for pair in zip(told, true)]
    assert abs(stats.pearsonr(told - true, true).statistic) > 0.4
    assert stats.pearsonr(gaps, true).statistic == pytest.approx(0, abs=1e-6)
    assert np.mean(gaps) == pytest.approx(0, abs=1e-9)


def test_two_are_compared_by_their_errors_of_the_same_people() -> None:
    told, true = drawn(60)
    found = numbers.compare(told, true + 1, true)
    assert found.errors == (pytest.approx(np.abs(told - true).mean()), pytest.approx(1.0))
    assert found.p == pytest.approx(stats.ttest_rel(np.abs(told - true), np.ones(60)).pvalue)
    assert numbers.compare(true, true, true).p == 1


def test_a_table_of_numbers_is_read_back_as_it_was_told() -> None:
    rows = [Prediction("a", "I1", 71.5, (68.25,)), Prediction("b", "I2", None, (70.0,))]
    table = [{k: str(v) for k, v in row.items()} for row in table_rows(rows, ["age"], {})]
    assert list(table[0]) == ["subject", "image_id", "label", "predicted_age", "error"]
    outputs, labels, names = read_outputs(table)
    assert (outputs.tolist(), labels.tolist(), names) == ([[68.25]], [71.5], ["age"])
