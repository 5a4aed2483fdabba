"""Networks of transformers train in stages as in one process, however they are made and trained."""

from pathlib import Path

import pytest
from libraries import needs
from matrix import CELLS, PAGE, Cell, page_with_table, read, run


@pytest.mark.real
@pytest.mark.distributed
@needs("transformers", "peft")
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name.replace(" ", "-"))
def test_a_network_trains_as_in_one_process(cell: Cell, tmp_path: Path) -> None:
    known, found = read()[cell.name], run(cell, tmp_path)
    assert ("difference" in found) is ("difference" in known)
    if "refused" in known:  # in words that help: they stand on the page
        assert found == known


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert page_with_table(text) == text, "python tests/real/matrix.py writes it"


@pytest.mark.real
def test_all_cells_have_run_and_few_are_refused() -> None:
    results = read()
    assert list(results) == [cell.name for cell in CELLS]
    refused = [name for name, result in results.items() if "refused" in result]
    equal = [name for name, result in results.items() if "difference" in result]
    assert len(refused) <= 8
    assert len(refused) + len(equal) == len(CELLS)
