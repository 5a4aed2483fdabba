"""Training scripts as the documentation of other libraries has them, in two stages."""

from pathlib import Path

import pytest
import torch
from libraries import needs
from matrix import HERE, run_ranks

SCRIPTS = {
    "causal_lm": ("transformers",),
    "lora": ("transformers", "peft"),
    "prefixes": ("transformers", "peft"),
    "adapters": ("transformers", "peft"),
    "summaries": ("transformers",),
    "diffusion": ("diffusers",),
    "graphs": ("torch_geometric",),
    "image_classifier": ("timm", "torchvision"),
    "segmentation": ("segmentation_models_pytorch", "torchvision"),
    "self_supervised": ("lightly", "torchvision"),
}


@pytest.mark.real
@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*SCRIPTS[name])) for name in SCRIPTS]
)
def test_a_script_trains_in_stages_as_on_one_device(name: str, tmp_path: Path) -> None:
    command = [str(HERE / "library_script.py"), str(tmp_path), name]
    run_ranks(command, 1, tmp_path, 240)
    run_ranks(command, 2, tmp_path, 400)
    expected, found = (torch.load(tmp_path / file) for file in ("one.pt", "rank0.pt"))
    assert found["stages"] == 2
    moved = [n for n, w in expected["weights"].items() if not w.equal(expected["before"][n])]
    assert len(moved) > 4, "nothing was trained"
    assert len(expected["losses"]) > 3
    for part in ("losses", "metrics", "weights"):
        torch.testing.assert_close(found[part], expected[part], rtol=1e-9, atol=1e-9)


def test_each_script_is_run() -> None:
    assert {file.stem for file in (HERE / "scripts").glob("*.py")} == SCRIPTS.keys()
