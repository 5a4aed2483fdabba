"""The page of measurements is short, names commands that exist, and rests on files of numbers."""

import csv
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks._results import COLUMNS, record

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measurements.md"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.csv"))
DATE = re.compile(r"2\d{3}-[01]\d-[0-3]\d")
MODULES = ("models", "datamodules")  # `models predict` is typed `python -m models predict`


def commands(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def claims() -> list[tuple[str, ...]]:
    """Claim, number, command and date of each row of each table of the page."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    return [row for row in rows if row[0] not in ("claim", "---")]


def missing(command: str) -> list[str]:
    """What a command names and this repository does not have."""
    words = command.split()
    script = next((word for word in words if "=" not in word), "")  # behind an environment
    if script == "make":
        targets = re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", (ROOT / "Makefile").read_text(), re.M)
        return [word for word in words[1:] if word not in targets]
    if script in MODULES:
        return [] if (ROOT / script / "__main__.py").is_file() else [script]
    if script == "pytest":
        return [word for word in words[words.index(script) + 1 :] if not (ROOT / word).exists()]
    at = ROOT / script if "/" in script else ROOT / "benchmarks" / script
    return [] if at.exists() else [script]


def test_the_page_has_at_most_eighty_lines() -> None:
    assert len(PAGE.read_text().splitlines()) <= 80


def test_each_claim_has_a_number_a_command_that_exists_and_a_date() -> None:
    rows = claims()
    assert rows
    for row in rows:
        assert len(row) == 4, row
        _, number, command, date = row
        assert re.search(r"\d", number), row
        assert commands(command), row
        assert not [name for each in commands(command) for name in missing(each)], row
        assert DATE.fullmatch(date) or date == "each commit", row


def test_a_command_that_is_not_there_is_seen() -> None:
    assert missing("no_benchmark.py --rounds 3") == ["no_benchmark.py"]
    assert missing("make nothing") == ["nothing"]
    assert missing("tests/test_nothing.py") == ["tests/test_nothing.py"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_rows_of_results_are_dated_numbers_of_commands_that_exist(path: Path) -> None:
    with path.open(newline="") as file:
        heading, *rows = csv.reader(file)
    assert tuple(heading) == COLUMNS
    assert rows
    for row in rows:
        date, torch, machine, command, name, value, _ = row
        assert DATE.fullmatch(date), row
        assert torch, row
        assert machine, row
        assert missing(command) == [], row
        assert name, row
        float(value)


def test_a_benchmark_adds_its_numbers_to_the_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/speed.py", "--peers", "ddp;automatic"])
    folder = tmp_path / "results"
    path = record({"ddp": 0.95, "automatic": 1 / 3}, "s", folder)
    assert record({"ratio": 0.3508771929824561}, "", folder) == path == folder / "speed.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["value"], row["unit"]) for row in rows] == [
        ("ddp", "0.95", "s"),
        ("automatic", "0.333333", "s"),
        ("ratio", "0.350877", ""),
    ]
    for row in rows:
        assert tuple(row) == COLUMNS
        assert DATE.fullmatch(row["date"])
        assert row["torch"] == version("torch")
        assert row["machine"].split()[1].startswith("core")
        assert row["command"] == "speed.py --peers 'ddp;automatic'"


def test_each_row_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py"])
    path = record({"a": 1.0}, "s", tmp_path)
    assert path.read_text().endswith("s\n")
    record({"b, with a comma": 2.0}, "s", tmp_path)
    with path.open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["a", "b, with a comma"]


def test_the_readme_is_short_and_its_ratios_have_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    heading = "| case | beside | ratio | command in `benchmarks/` |\n"
    assert text.count(heading) == 1
    table = text.partition(heading)[2].partition("\n\n")[0].splitlines()[1:]
    assert table
    for row in table:
        *_, ratio, command = row.strip("|").split(" | ")
        assert re.search(r"\d\.\d\d", ratio), row
        [named] = commands(command)
        assert missing(named) == [], row
