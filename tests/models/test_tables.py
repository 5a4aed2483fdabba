from models.tables import read_table, write_table


def test_a_table_has_a_header_and_short_numbers(tmp_path) -> None:
    rows = [{"subject": "999_S_0001", "probability": 1 / 3, "peak_in_truth": None}]
    write_table(rows, tmp_path / "t.tsv")
    lines = (tmp_path / "t.tsv").read_text().splitlines()
    assert lines == ["subject\tprobability\tpeak_in_truth", "999_S_0001\t0.3333\t"]
    assert read_table(tmp_path / "t.tsv")[0]["probability"] == "0.3333"
    assert [path.name for path in tmp_path.iterdir()] == ["t.tsv"]
