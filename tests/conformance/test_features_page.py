"""The tables of `docs/features.md` name tests that exist."""

import ast
import re
from pathlib import Path

import pytest
from suite import all_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "features.md"
STATES = ("works", "refused", "not yet", "not seen", "not split")


def table() -> list[tuple[str, str, list[str]]]:
    """What, state and tests of each row of each table."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and not line.startswith("| ---") and cells[-1].strip() != "tests":
            found.append((cells[0], cells[1], re.findall(r"`([^`]+)`", cells[-1])))
    return found


def exists(test: str) -> bool:
    """A row of the suite, a file, or `file::function`."""
    if test in {row.__name__ for row in all_rows()}:
        return True
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    nodes = ast.walk(ast.parse(path.read_text()))
    return not name or name in {n.name for n in nodes if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize(("what", "state", "tests"), table())
def test_a_feature_has_a_state_and_tests_that_exist(
    what: str, state: str, tests: list[str]
) -> None:
    assert state.startswith(STATES), f"{what}: {state}"
    assert tests or state.startswith("not yet"), what
    assert [test for test in tests if not exists(test)] == []


def test_every_row_of_the_suite_is_on_the_page() -> None:
    named = {test for _, _, tests in table() for test in tests}
    assert [row.__name__ for row in all_rows() if row.__name__ not in named] == []
