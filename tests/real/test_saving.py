"""What was trained in stages is saved as a folder for `from_pretrained`, as on one device."""

from pathlib import Path

import pytest
import torch
from libraries import needs
from matrix import HERE, run_ranks
from torch import Tensor

from lightning_hybrid.cli import main

pytestmark = [
    pytest.mark.real,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),
    needs("transformers", "peft", "safetensors"),
]


def trained(folder: Path, model: str, place: str, variant: str) -> dict[str, Tensor]:
    """Train in two stages, and in one process, whose weights are returned."""
    command = [str(HERE / "saving_script.py"), str(folder), model, place, variant]
    run_ranks(command, 1, folder, 120)
    run_ranks(command, 2, folder, 240)
    weights: dict[str, Tensor] = torch.load(folder / "alone.pt")
    return weights


def assert_holds(folder: Path, expected: dict[str, Tensor]) -> None:
    """`from_pretrained` of a folder of several files has these weights."""
    import transformers

    assert len([*folder.glob("*.safetensors")]) > 2
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = net.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_save_pretrained_after_fit_is_that_of_one_device(tmp_path: Path, model: str) -> None:
    assert_holds(tmp_path / "saved", trained(tmp_path, model, "__init__", "plain"))


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_what_no_rank_has_whole_is_saved_as_that_of_one_device(tmp_path: Path, model: str) -> None:
    expected = trained(tmp_path, model, "configure_model", "plain")
    assert_holds(tmp_path / "saved", expected)
    out = tmp_path / "consolidated"
    like = ["--like", str(tmp_path / "base"), "--max-shard-size", "20 kB"]
    command = ["consolidate", str(tmp_path / "last.ckpt"), str(out), "--to", "safetensors"]
    assert main([*command, *like]) == 0
    assert_holds(out, expected)


@pytest.mark.parametrize("place", ["__init__", "configure_model"])
def test_adapters_are_gathered_alone(tmp_path: Path, place: str) -> None:
    from safetensors.torch import load_file

    trained(tmp_path, "llama", place, "lora")
    expected = load_file(tmp_path / "one_device/adapter_model.safetensors")
    assert expected
    assert all("lora" in name for name in expected)
    in_the_run, came = torch.load(tmp_path / "in_the_run.pt")
    assert all("lora" in name for name in came)
    assert came
    found = torch.load(tmp_path / "after_the_run.pt")
    saved = load_file(tmp_path / "saved/adapter_model.safetensors")
    for adapters in (found, saved, in_the_run):
        assert adapters.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(adapters[name], value, rtol=1e-12, atol=1e-12)
    assert_holds(tmp_path / "merged", torch.load(tmp_path / "merged.pt"))
