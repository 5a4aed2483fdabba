"""More words, adapters on tied layers, and layers that are trained beside adapters."""

from pathlib import Path

import pytest
from libraries import needs
from matrix import PLACES, SOURCES, Cell, run

pytestmark = [
    pytest.mark.real,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),
    needs("transformers", "peft", "safetensors"),
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", ["resized", "tied-lora", "saved-head", "saved-table"])
def test_a_tied_network_is_trained_as_on_one_device(
    tmp_path: Path, source: str, place: str, variant: str
) -> None:
    assert "difference" in run(Cell("gpt2", source, place, variant), tmp_path)


def test_more_words_without_a_tie_are_those_of_one_device(tmp_path: Path) -> None:
    assert "difference" in run(Cell("llama", "folder", "configure_model", "resized"), tmp_path)
