import math

import numpy as np
import pytest
from sklearn import metrics as sk

from models.metrics import calibration_error, evaluate, never_named, roc
from models.scores import not_learnt


def drawn(classes: int, scans: int = 60) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(classes)
    probabilities = random.dirichlet(np.ones(classes), scans).round(2)  # with ties
    return probabilities, random.integers(classes, size=scans)


@pytest.mark.parametrize("classes", [2, 3])
def test_equals_scikit_learn(classes) -> None:
    probabilities, labels = drawn(classes)
    called = probabilities.argmax(1)
    average = "binary" if classes == 2 else "macro"
    scores = [sk.roc_auc_score(labels == k, probabilities[:, k]) for k in range(classes)]
    expected = {
        "accuracy": sk.accuracy_score(labels, called),
        "balanced_accuracy": sk.balanced_accuracy_score(labels, called),
        "auroc": scores[1] if classes == 2 else np.mean(scores),
        "sensitivity": sk.recall_score(labels, called, average=average),
        "f1": sk.f1_score(labels, called, average=average),
        "mcc": sk.matthews_corrcoef(labels, called),
    }
    found = evaluate(probabilities, labels)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    if classes == 2:
        expected_brier = sk.brier_score_loss(labels, probabilities[:, 1])
        assert found["brier"] == pytest.approx(expected_brier, abs=1e-6)
        assert found["specificity"] == pytest.approx(sk.recall_score(1 - labels, 1 - called))


def test_the_roc_curve_is_that_of_scikit_learn() -> None:
    probabilities, labels = drawn(2)
    expected = sk.roc_curve(labels, probabilities[:, 1], drop_intermediate=False)
    for own, theirs in zip(roc(probabilities[:, 1], labels == 1), expected):
        np.testing.assert_allclose(own, theirs)


def test_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    probabilities = np.array([[0.25, 0.75]] * 4 + [[0.95, 0.05]] * 4)
    labels = np.array([1, 1, 0, 0, 0, 0, 0, 0])  # right half the time at 0.75, always at 0.95
    assert calibration_error(probabilities, labels) == pytest.approx((0.25 + 0.05) / 2)


def test_a_number_that_is_nearly_one_for_all_is_said() -> None:
    true = np.array([60.0, 70, 75, 81])
    flat = np.array([[72.0], [72.5], [73], [72.9]])
    said = not_learnt(flat, true, ("age",))
    assert "nearly the same age, 72.0 to 73.0, and they have 60.0 to 81.0" in said
    assert not_learnt(true[:, None] * 0.5, true, ("age",)) == ""
    assert not_learnt(flat[:1], true[:1], ("age",)) == ""


def test_a_class_that_is_never_named_is_said() -> None:
    values = np.array([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]])
    assert "says AD of none of 3 scans" in never_named(values, ("NC", "AD"))
    assert never_named(np.array([[0.9, 0.1], [0.4, 0.6]]), ("NC", "AD")) == ""
    three = np.array([[0.1, 0.8, 0.1]] * 4)
    assert "says NC and AD of none" in never_named(three, ("NC", "MCI", "AD"))


def test_one_class_alone_leaves_the_auroc_undefined() -> None:
    found = evaluate(np.array([[0.2, 0.8], [0.6, 0.4]]), np.array([1, 1]))
    assert math.isnan(found["auroc"])
    assert math.isnan(found["specificity"])
    assert found["sensitivity"] == 0.5
