import torch

from models.tables import prediction_rows, write_table


def test_predictions_become_one_row_per_scan() -> None:
    batch = {"subject": ["999_S_0001", "999_S_0002"], "label": torch.tensor([0, 1])}
    batch["probabilities"] = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    assert prediction_rows([batch]) == [
        {"subject": "999_S_0001", "label": 0, "probability": 0.25},
        {"subject": "999_S_0002", "label": 1, "probability": 0.5},
    ]


def test_a_table_has_a_header_and_short_numbers(tmp_path) -> None:
    rows = [{"subject": "999_S_0001", "probability": 1 / 3, "peak_in_truth": None}]
    write_table(rows, tmp_path / "t.tsv")
    lines = (tmp_path / "t.tsv").read_text().splitlines()
    assert lines == ["subject\tprobability\tpeak_in_truth", "999_S_0001\t0.3333\t"]
