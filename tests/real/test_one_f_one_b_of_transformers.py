"""Networks of transformers whose embedding is their head, under `schedule="1f1b"`."""

from pathlib import Path

import pytest
import torch
from libraries import needs
from matrix import HERE, TOLERANCE, run_ranks


@pytest.mark.real
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
@needs("transformers")
@pytest.mark.parametrize("model", ["gpt2", "bert-mlm", "gemma2", "t5"])
def test_tied_networks_go_back_inside_of_their_calls(tmp_path: Path, model: str) -> None:
    command = [str(HERE / "cell_script.py"), str(tmp_path), model, "config", "__init__", "1f1b"]
    run_ranks(command, 1, tmp_path, 120)
    run_ranks(command, 2, tmp_path, 240)
    alone, found = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "rank0"))
    assert found["logits"] == "Late"  # they were not computed: the backwards ran inside of the call
    # (some of them compute the loss in float32; its gradients have the bits of one device)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(
            found["weights"][name], weight, rtol=TOLERANCE, atol=TOLERANCE, msg=name
        )
