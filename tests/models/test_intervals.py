"""Intervals hold what they promise, by simulation, and are not given where they cannot."""

import numpy as np
import pytest
from scipy import stats

from benchmarks import interval_coverage as coverage
from models.compare import compare
from models.intervals import FEWEST, FEWEST_OF_RECALL, auroc_interval, intervals, wilson

SIZES = (6, 10, 20, 50, 100, 200)


@pytest.mark.parametrize("people", SIZES)
def test_wilson_covers_95_percent_over_the_shares_that_occur(people):
    counts, shares = np.arange(people + 1), np.linspace(0.55, 0.97, 85)
    bounds = np.array([wilson(count / people, people) for count in counts])
    covered = [
        stats.binom.pmf(counts, people, p)[(bounds[:, 0] <= p) & (p <= bounds[:, 1])].sum()
        for p in shares
    ]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("people", [FEWEST, 10, 15, 20, 50, 100, 200])
def test_wilson_covers_95_percent_near_every_share(people):
    assert coverage.shares(people) == pytest.approx((0.95, 0.95), abs=0.02)


@pytest.mark.parametrize("people", [(15, 15), (15, 40), (50, 50)])
def test_the_interval_of_a_mean_of_shares_covers_95_percent_near_every_pair(people):
    assert coverage.balanced_accuracy(*people) == pytest.approx((0.95, 0.95), abs=0.02)


@pytest.mark.parametrize("people", [14, 20, 50, 100, 200])
def test_the_interval_of_an_area_covers_95_percent(people):
    random = np.random.default_rng(people)
    positive = np.arange(people) % 2 == 0
    names, hits = np.arange(people), []
    for area in (0.6, 0.8, 0.9, 0.97):
        shift = stats.norm.ppf(area) * np.sqrt(2)
        for _ in range(500):
            low, high = auroc_interval(random.normal(shift * positive), positive, names)
            hits.append(low <= area <= high)
    # one standard error of 2000 runs is half a point
    assert np.mean(hits) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(("hits", "misses"), [(3, 3), (6, 6), (10, 40), (40, 10)])
def test_no_interval_of_an_area_where_none_was_found_to_hold(hits, misses):
    positive = np.arange(hits + misses) < hits
    scores = np.random.default_rng(0).normal(positive)
    assert auroc_interval(scores, positive, np.arange(len(positive))) is None


@pytest.mark.parametrize("people", [FEWEST_OF_RECALL, 30, 50])
def test_the_interval_of_a_mean_of_shares_covers_95_percent(people):
    random = np.random.default_rng(0)
    labels = np.arange(2 * people) % 2
    names, hits = [str(i) for i in range(2 * people)], []
    for sensitivity, specificity in ((0.7, 0.9), (0.85, 0.85)):
        for _ in range(150):
            right = random.random(2 * people) < np.where(labels, sensitivity, specificity)
            called = np.where(right, labels, 1 - labels)
            found = intervals(np.eye(2)[called] * 0.8 + 0.1, labels, names)["balanced_accuracy"]
            hits.append(found[0] <= (sensitivity + specificity) / 2 <= found[1])
    assert np.mean(hits) == pytest.approx(0.95, abs=0.05)


def drawn(people: int, times: int = 1) -> tuple[np.ndarray, np.ndarray, list[str]]:
    random = np.random.default_rng(people)
    labels = np.arange(people) % 2
    scores = 1 / (1 + np.exp(-random.normal(2 * labels - 1)))
    probabilities = np.repeat(np.stack([1 - scores, scores], axis=1), times, axis=0)
    return probabilities, np.repeat(labels, times), [str(i // times) for i in range(people * times)]


def test_no_interval_where_too_few_people_could_tell():
    assert intervals(*drawn(FEWEST - 1)) == {}
    assert "brier" not in intervals(*drawn(60))
    assert intervals(*drawn(60)).keys() >= {"accuracy", "auroc", "sensitivity", "specificity"}
    many = intervals(*drawn(150))
    assert many.keys() >= {"brier", "mcc"}
    assert not {"f1", "calibration_error"} & many.keys()


def test_scans_of_one_person_make_no_interval_narrower():
    once, often = intervals(*drawn(40)), intervals(*drawn(40, times=4))
    for name, bounds in once.items():
        assert often[name] == pytest.approx(bounds)


def test_all_right_is_no_certainty():
    labels = np.arange(12) % 2
    found = intervals(np.eye(2)[labels], labels, [str(i) for i in range(12)])
    assert all(low < 0.85 and high == 1 for low, high in found.values())


def test_the_same_in_every_run():
    assert intervals(*drawn(150)) == intervals(*drawn(150))


def test_delong_equals_the_published_formula_on_a_worked_example():
    # Hanley and McNeil's ordering, worked by hand: 3 positives, 3 negatives
    labels = np.array([1, 1, 1, 0, 0, 0])
    first = np.array([0.9, 0.8, 0.3, 0.4, 0.2, 0.1])
    second = np.array([0.6, 0.2, 0.7, 0.5, 0.4, 0.1])
    found = compare(
        np.stack([1 - first, first], axis=1), np.stack([1 - second, second], axis=1), labels
    )
    assert found.areas == pytest.approx((8 / 9, 7 / 9))
    hits = np.cov([1, 1, 2 / 3], [1, 1 / 3, 1])
    misses = np.cov([2 / 3, 1, 1], [2 / 3, 2 / 3, 1])
    variance = (hits[0, 0] + hits[1, 1] - 2 * hits[0, 1]) / 3
    variance += (misses[0, 0] + misses[1, 1] - 2 * misses[0, 1]) / 3
    expected = 2 * stats.norm.sf((1 / 9) / np.sqrt(variance))
    assert found.delong_p == pytest.approx(expected)


def test_one_person_of_a_class_has_no_variance_of_which_a_p_value_could_be_made():
    scores = np.array([0.9, 0.4, 0.2]), np.array([0.3, 0.4, 0.2])
    found = compare(*(np.stack([1 - p, p], axis=1) for p in scores), np.array([1, 0, 0]))
    assert np.isnan(found.delong_p)
    assert found.areas == (1.0, 0.5)


def test_paired_tests_reject_equal_classifiers_as_often_as_they_say():
    random = np.random.default_rng(3)
    labels = np.arange(80) % 2
    p_values = []
    for _ in range(150):
        truth = random.normal(1.5 * labels)
        pair = [truth + random.normal(size=80) for _ in range(2)]
        first, second = (1 / (1 + np.exp(0.75 - scores)) for scores in pair)
        stacked = [np.stack([1 - p, p], axis=1) for p in (first, second)]
        found = compare(*stacked, labels)
        p_values.append((found.mcnemar_p < 0.05, found.delong_p < 0.05))
    mcnemar, delong = np.mean(p_values, axis=0)
    assert mcnemar < 0.09  # exact, so at most 5 % but for chance
    assert delong == pytest.approx(0.05, abs=0.055)
