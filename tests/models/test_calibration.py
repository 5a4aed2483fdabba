"""Calibration: slope and intercept find what was done to honest probabilities."""

import math

import numpy as np
import pytest
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from models.calibration import (
    calibration_intervals,
    observed,
    predictive_values,
    recalibrated,
    slope_and_intercept,
)
from models.commands.cohort_tables import calibration_rows


def honest(scans: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    probabilities = expit(random.normal(0, 1.5, scans))
    return probabilities, (random.random(scans) < probabilities).astype(int)


def test_honest_probabilities_have_slope_one_and_intercept_zero():
    slope, intercept = slope_and_intercept(*honest())
    assert slope == pytest.approx(1, abs=0.08)
    assert intercept == pytest.approx(0, abs=0.08)


def test_what_was_done_to_them_is_found_and_undone():
    probabilities, labels = honest()
    extreme = expit(2.5 * logit(probabilities))
    slope, _ = slope_and_intercept(extreme, labels)
    assert slope == pytest.approx(1 / 2.5, rel=0.08)
    shifted = expit(logit(probabilities) + 1)
    assert slope_and_intercept(shifted, labels)[1] == pytest.approx(-1, abs=0.1)
    assert recalibrated(extreme, 1 / 2.5, 0) == pytest.approx(probabilities, abs=0.01)


def test_the_slope_is_that_of_a_logistic_regression():
    probabilities, labels = honest(200)
    fit = LogisticRegression(C=np.inf, tol=1e-8).fit(logit(probabilities)[:, None], labels)
    assert slope_and_intercept(probabilities, labels)[0] == pytest.approx(fit.coef_[0, 0], rel=1e-3)


def test_classes_that_do_not_overlap_have_no_slope():
    slope, intercept = slope_and_intercept(np.array([0.1, 0.2, 0.8, 0.9]), np.array([0, 0, 1, 1]))
    assert math.isnan(slope)
    assert abs(intercept) < 1
    assert all(map(math.isnan, slope_and_intercept(np.array([0.4, 0.6]), np.array([1, 1]))))
    # of the two that meet in 0.5 the likeliest slope is infinite too
    touching = np.array([0.1, 0.5, 0.5, 0.9]), np.array([0, 0, 1, 1])
    assert math.isnan(slope_and_intercept(*touching)[0])


def test_the_curve_of_honest_probabilities_lies_on_the_diagonal():
    for mean, share, bounds, count in observed(*honest()):
        assert count == 1200
        assert bounds is not None
        assert bounds[0] - 0.02 <= mean <= bounds[1] + 0.02
        assert share == pytest.approx(mean, abs=0.04)


def test_predictive_values_are_bayes():
    assert predictive_values(0.9, 0.8, 0.1) == pytest.approx((0.09 / 0.27, 0.72 / 0.73))
    assert math.isnan(predictive_values(0, 1, 0.1)[0])


def test_a_small_cohort_whose_classes_are_apart_is_recalibrated_by_its_intercept():
    labels = np.arange(32) // 2 % 2
    raw = np.where(labels == 1, 0.45, 0.02) + np.linspace(0, 0.05, 32)
    rows = calibration_rows(raw, raw, labels, [f"{number:02}" for number in range(32)])
    assert rows[2]["probabilities"].endswith("intercept alone, cross-fitted")
    assert abs(rows[2]["intercept"]) < abs(rows[0]["intercept"])


def test_recalibration_is_judged_on_people_that_it_was_not_fitted_on():
    """Two scans of each person, one with the other: neither may tell the other's calibration."""
    random = np.random.default_rng(0)
    labels = np.repeat(random.integers(0, 2, 40), 2)
    logits = np.repeat(random.normal(size=40) + labels[::2], 2)
    raw, people = 1 / (1 + np.exp(-logits)), np.repeat([f"{n:02}" for n in range(40)], 2)
    doubled = calibration_rows(raw, raw, labels, people)
    single = calibration_rows(raw[::2], raw[::2], labels[::2], people[::2])
    assert doubled[2]["brier"] == pytest.approx(single[2]["brier"], abs=1e-4)
    assert "slope" in single[0]
    assert "slope" not in doubled[0]  # two scans of a person are nearly one


def test_few_people_have_neither_slope_nor_intercept():
    random = np.random.default_rng(0)
    labels, raw = random.integers(0, 2, 20), random.uniform(size=20)
    rows = calibration_rows(raw, raw, labels, [f"{number:02}" for number in range(20)])
    assert all(row.keys() == {"probabilities", "brier"} for row in rows)


@pytest.mark.parametrize(("stretch", "people"), [(1.0, 40), (1.6, 40), (0.6, 120)])
def test_intervals_hold_what_was_done_to_honest_probabilities(stretch, people):
    random, held = np.random.default_rng(0), {"slope": [], "intercept": []}
    for _ in range(150):
        logits = random.normal(0, 1.5, people)
        labels = (random.random(people) < expit(logits)).astype(int)
        found = calibration_intervals(expit(logits / stretch), labels)
        if "slope" in found:
            held["slope"].append(found["slope"][0] <= stretch <= found["slope"][1])
        low, high = calibration_intervals(expit(logits), labels)["intercept"]
        held["intercept"].append(low <= 0 <= high)
    assert len(held["slope"]) > 140
    assert np.mean(held["slope"]) >= 0.9
    assert 0.9 <= np.mean(held["intercept"]) <= 0.99


def test_few_people_several_scans_of_one_and_classes_apart_have_no_interval():
    probabilities, labels = honest(60)
    assert calibration_intervals(probabilities[:20], labels[:20]) == {}
    apart = calibration_intervals(np.linspace(0.1, 0.9, 40), (np.arange(40) >= 20).astype(int))
    assert set(apart) == {"intercept"}
    people = [str(n) for n in range(60)]
    row = calibration_rows(probabilities, probabilities, labels, people)[0]
    assert row["slope_low"] < row["slope"] < row["slope_high"]
    twice = calibration_rows(probabilities, probabilities, labels, ["1", *people[1:-1], "1"])[0]
    assert not {"slope", "intercept"} & twice.keys()
