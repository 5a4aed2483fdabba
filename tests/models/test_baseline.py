"""A logistic regression beside the network: what it sees, whom it sees, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from datamodules.labels import TASKS
from datamodules.records import ScanRecord
from models.commands.baseline import Baseline, fit_baseline, hippocampal, verdict
from models.localisation import REGIONS
from models.predictions import Prediction
from models.report.sections import metrics
from models.results import save_result

SHAPE = (40, 48, 40)
AFFINE = np.diag([4.0, 4.0, 4.0, 1.0])
AFFINE[:3, 3] = [-78, -112, -60]


def head(fluid: float = 0.0) -> np.ndarray:
    """A brain of 0.5 with a share ``fluid`` of the boxes around the hippocampi at -2."""
    image = np.full(SHAPE, 0.5, np.float32)
    rng = np.random.default_rng(int(fluid * 100))
    for side in ("left hippocampus", "right hippocampus"):
        inside = [
            (4 * np.arange(n) + a >= low) & (4 * np.arange(n) + a <= high)
            for n, a, (low, high) in zip(SHAPE, AFFINE[:3, 3], REGIONS[side])
        ]
        box = image[np.ix_(*inside)]
        box[rng.random(box.shape) < 0.05 + fluid] = -2
        image[np.ix_(*inside)] = box
    return image


class Data:
    """A data module of people whose ages and fluids are given."""

    def __init__(
        self, parts: dict[str, list[tuple[ScanRecord, float]]], middle: Any, task: str = "ad_nc"
    ) -> None:
        self.parts, self.preprocessing, self.task = parts, {"middle_mm": middle}, TASKS[task]

    def scans(self, part: str) -> list[ScanRecord]:
        return [record for record, _ in self.parts[part]]

    def dataset(self, part: str) -> list[dict[str, torch.Tensor]]:
        affine = torch.tensor(AFFINE, dtype=torch.float32)
        return [
            {"image": torch.tensor(head(fluid))[None], "affine": affine}
            for _, fluid in self.parts[part]
        ]


def person(number: int, label: int, **known: Any) -> ScanRecord:
    values = {"age": 70.0 + number % 7, "sex": "FM"[number // 2 % 2], **known}
    name = f"999_S_{number:04d}"
    return ScanRecord(subject=name, image_id=f"I{number}", path="", label=label, **values)


def cohort(start: int, people: int, effect: float) -> list[tuple[ScanRecord, float]]:
    rng = np.random.default_rng(start)
    return [
        (person(start + k, k % 2), 0.2 + effect * (k % 2) + float(rng.uniform(0, 0.1)))
        for k in range(people)
    ]


def asked(rows: list[tuple[ScanRecord, float]]) -> list[Prediction]:
    return [Prediction(r.subject, r.image_id, r.label, (0.5, 0.5)) for r, _ in rows]


def test_more_fluid_around_the_hippocampi_is_less_tissue():
    volumes = [hippocampal(head(fluid), AFFINE) for fluid in (0.0, 0.1, 0.2, 0.4)]
    assert all(more > less for more, less in pairwise(volumes))
    full = hippocampal(head(0.0), AFFINE)
    assert volumes[3] / full == pytest.approx(0.55 / 0.95, abs=0.05)


def test_a_change_of_contrast_is_no_change_of_volume():
    image = head(0.2)
    assert hippocampal(image * 3 + 0.01, AFFINE) == pytest.approx(hippocampal(image, AFFINE))


def test_registered_scans_are_judged_by_the_tissue_and_raw_ones_by_the_head():
    rows = {"train": cohort(0, 40, 0.3), "test": cohort(100, 20, 0.3)}
    tested = asked(rows["test"])
    registered = fit_baseline(Data(rows, [0.0, -18.0, 18.0]), tested)
    assert registered.features == ("age", "sex", "tissue around the hippocampi")
    right = [int(np.argmax(row.outputs)) == row.label for row in registered.predictions]
    assert np.mean(right) == 1
    raw = fit_baseline(Data(rows, None), tested)
    assert raw.features == ("age", "sex", "volume of the head")
    guessed = [int(np.argmax(row.outputs)) == row.label for row in raw.predictions]
    assert np.mean(guessed) < 0.8


def test_it_is_scikit_learns_regression_of_the_first_scans_of_those_trained_on():
    """Ages alone tell; a second scan of a person, of another age, must not count."""
    train = [(person(k, k % 2, age=70.0 + 6 * (k % 2) + k % 5, sex=""), 0.1) for k in range(30)]
    later = [
        (replace(r, image_id=f"{r.image_id}b", age=20.0, acq_date="2020-01-01"), f)
        for r, f in train[:9]
    ]
    train = [(replace(r, acq_date="2010-01-01"), f) for r, f in train]
    test = [(person(100 + k, k % 2, age=68.0 + k, sex=""), 0.1) for k in range(9)]
    data = Data({"train": later + train, "test": test}, None)
    found = fit_baseline(data, asked(test))
    assert found.features == ("age", "volume of the head")  # the sex of nobody is known
    ages = np.array([r.age for r, _ in train])
    scaled = lambda values: ((np.array(values) - ages.mean()) / ages.std())[:, None]  # noqa: E731
    direct = LogisticRegression().fit(scaled(ages), [r.label for r, _ in train])
    wanted = direct.predict_proba(scaled([r.age for r, _ in test]))
    assert np.allclose([row.outputs for row in found.predictions], wanted, atol=1e-4)


def test_a_number_is_told_by_scikit_learns_linear_regression_and_age_not_by_itself():
    train = [(person(k, 0, target=60.0 + k, age=60.0 + k, sex="FM"[k % 2]), 0.1) for k in range(20)]
    test = [(person(100 + k, 0, target=80.0, age=80.0, sex="FM"[k % 2]), 0.1) for k in range(4)]
    asks = [Prediction(r.subject, r.image_id, r.target, (0.0,)) for r, _ in test]
    found = fit_baseline(Data({"train": train, "test": test}, None, "age"), asks)
    assert found.features == ("sex", "volume of the head")
    means = {sex: np.mean([r.target for r, _ in train if r.sex == sex]) for sex in "FM"}
    told = [row.outputs[0] for row in found.predictions]
    assert told == pytest.approx([means[r.sex] for r, _ in test])
    better = [replace(row, outputs=(row.label + 0.1 * k,)) for k, row in enumerate(asks)]
    assert (
        "The network beats a linear regression on sex, volume of the head: mean absolute error"
        in (verdict(better, found))
    )
    assert "does not beat" in verdict([replace(row, outputs=(200.0,)) for row in asks], found)


def said(probabilities: list[float], labels: list[int]) -> list[Prediction]:
    return [
        Prediction(f"s{k}", f"I{k}", labels[k], (1 - p, p)) for k, p in enumerate(probabilities)
    ]


@pytest.mark.parametrize(
    ("network", "simple", "words"),
    [
        ([0.1, 0.9], [0.4, 0.6], "does not beat"),  # both are right about everybody
        ([0.45, 0.55], [0.9, 0.1], "The network beats"),
        ([0.6, 0.4], [0.1, 0.9], "does not beat"),
    ],
)
def test_a_network_that_does_not_beat_it_is_said_to(network, simple, words):
    labels = [0, 1] * 20
    text = verdict(said(network * 20, labels), Baseline(("age",), said(simple * 20, labels)))
    assert words in text
    assert "40 people" in text
    assert "a logistic regression on age" in text


def test_a_lead_that_may_be_chance_is_not_called_one():
    labels = [0, 1] * 6
    rng = np.random.default_rng(3)
    better = [float(p) for p in 0.5 + 0.2 * (np.array(labels) - 0.5) + rng.normal(0, 0.2, 12)]
    worse = [float(p) for p in 0.5 + 0.1 * (np.array(labels) - 0.5) + rng.normal(0, 0.2, 12)]
    text = verdict(said(better, labels), Baseline(("age",), said(worse, labels)))
    assert "is not shown to beat" in text


def test_three_classes_are_compared_by_accuracy():
    rows = [Prediction(f"s{k}", f"I{k}", k % 3, tuple(np.eye(3)[k % 3])) for k in range(30)]
    guess = [replace(row, outputs=(0.4, 0.3, 0.3)) for row in rows]
    assert "beats" in verdict(rows, Baseline(("age",), guess))
    assert "accuracy 1.000 and 0.333" in verdict(rows, Baseline(("age",), guess))


def test_the_report_has_a_column_for_it_and_the_sentence(tmp_path: Path):
    save_result(tmp_path / "test_metrics.json", {"test/accuracy": 0.8, "test/auroc": 0.7}, {})
    assert "baseline" not in metrics(tmp_path)
    simple = {"accuracy": 0.9, "accuracy_low": 0.6, "accuracy_high": 0.97}
    settings = {"verdict": "The network does not beat it: 12 < 13."}
    save_result(tmp_path / "test_baseline.json", simple, settings)
    page = metrics(tmp_path)
    assert "0.900 (0.600 to 0.970)" in page
    assert "does not beat it: 12 &lt; 13." in page
