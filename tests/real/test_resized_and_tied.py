"""More words, adapters on tied layers, layers trained beside adapters; T5 with checkpointing."""

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


@pytest.mark.parametrize("place", PLACES)
def test_what_a_refusal_of_t5_with_checkpointing_advises_is_right(
    tmp_path: Path, place: str
) -> None:
    refused = run(Cell("t5", "config", place, "checkpointing"), tmp_path)["refused"]
    assert "gradient_checkpointing = False on its T5Attention modules" in refused
    cell = Cell("t5", "config", place, "checkpointing without marks")
    assert "difference" in run(cell, tmp_path)
