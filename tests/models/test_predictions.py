import torch

from models.predictions import Prediction, Predictions, arrays, table_rows

ROWS = [
    Prediction("999_S_0001", "I9000001", 0, (0.75, 0.25)),
    Prediction("999_S_0002", "I9000002", 1, (0.5, 0.5)),
]


def batch(*numbers: int) -> dict:
    return {
        "label": torch.tensor([number % 2 for number in numbers]),
        "subject": [f"999_S_{number:04d}" for number in numbers],
        "image_id": [f"I{9_000_000 + number}" for number in numbers],
    }


def test_a_scan_that_a_sampler_repeats_counts_once() -> None:
    collected = Predictions()
    collected.add(batch(2, 1), torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
    collected.add(batch(2), torch.tensor([[0.25, 0.75]]))
    found = collected.gathered()
    assert [row.image_id for row in found] == ["I9000001", "I9000002"]
    assert collected.gathered() == []


def test_scans_without_ids_are_all_kept() -> None:
    collected = Predictions()
    for _ in range(2):
        collected.add({"label": torch.tensor([0, 1])}, torch.full((2, 2), 0.5))
    assert len({row.subject for row in collected.gathered()}) == 4


def test_scans_without_label_are_not_scored() -> None:
    probabilities, labels, subjects = arrays([*ROWS, Prediction("x", "y", None, (1.0, 0.0))])
    assert probabilities.shape == (2, 2)
    assert labels.tolist() == [0, 1]
    assert subjects == ["999_S_0001", "999_S_0002"]


def test_a_row_has_classes_by_name_and_what_else_is_known() -> None:
    details = {"I9000001": {"session": "M00", "age": 71.5}}
    first, second = table_rows(ROWS, ("NC", "AD"), details)
    assert first == {
        "subject": "999_S_0001",
        "image_id": "I9000001",
        "label": 0,
        "class": "NC",
        "predicted": "NC",
        "p_NC": 0.75,
        "p_AD": 0.25,
        "session": "M00",
        "age": 71.5,
    }
    assert second.keys() == first.keys()
    assert second["age"] == ""
