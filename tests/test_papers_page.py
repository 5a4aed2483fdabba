"""The page of the papers names code and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
HEAD = ("what", "where", "the paper's, or ours", "test", "measured here, and claimed")
NAMED = re.compile(r"`([\w./]+\.\w+)(?:(::?)([\w.]+))?[` ]")


def rows() -> list[tuple[str, ...]]:
    """The tables of the four papers, without their heads."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    found = [tuple(c.strip() for c in re.split(r" \|(?= |$)", line[1:])[:-1]) for line in lines]
    return [row for row in found if len(row) == len(HEAD) and row[1] not in ("where", "---")]


@cache
def names(path: Path) -> frozenset[str]:
    """What a file defines: functions, classes with their methods, and variables."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{function.name}" for function in functions}
        if isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return frozenset(found)


def missing(cell: str, folder: Path) -> list[str]:
    """The files and names of a cell that this repository does not have."""
    wrong = []
    for file, _, name in NAMED.findall(cell):
        path = next((p for p in (folder / file, ROOT / file) if p.is_file()), None)
        if path is None or (name and name not in names(path)):
            wrong.append(f"{file} {name}")
    return wrong


def test_there_is_a_table_for_each_paper() -> None:
    assert PAGE.read_text().count(f" | {' | '.join(HEAD[1:])} |") == 4
    assert len(PAGE.read_text().splitlines()) <= 150


@pytest.mark.parametrize("entry", rows(), ids=lambda row: row[0][:40])
def test_code_and_tests_of_a_row_exist(entry: tuple[str, ...]) -> None:
    _, where, _, test, measured = entry
    assert missing(where, ROOT / "lightning_hybrid") == []
    assert missing(test, ROOT) == []
    assert missing(measured, ROOT / "benchmarks") == []
    if where and not where.startswith("not built"):
        assert NAMED.search(where)
        assert "::" in test


def test_a_name_that_is_not_there_is_seen() -> None:
    folder = ROOT / "lightning_hybrid"
    assert missing("`allocation/gabra.py:gabra`, `allocation/gabra.py:gone`", folder) == [
        "allocation/gabra.py gone"
    ]
    assert missing("`tests/test_gone.py::test_x`", ROOT) == ["tests/test_gone.py test_x"]
