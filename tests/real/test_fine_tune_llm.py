"""The example that fine-tunes a language model runs as written, and its adapters load elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from libraries import needs

ROOT = Path(__file__).parents[2]


@pytest.mark.real
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
@needs("transformers", "peft")
def test_the_example_leaves_adapters_that_peft_loads(tmp_path: Path) -> None:
    from networks_of_transformers import save
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save("llama", tmp_path / "network")
    done = subprocess.run(
        [sys.executable, ROOT / "examples/fine_tune_llm.py", "network"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "1 replica x 2 stages" in said
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "network")
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    words = torch.arange(3, 11)[None]
    without = base(input_ids=words).logits
    net = PeftModel.from_pretrained(base, tmp_path / "adapters")
    trained = [weight for name, weight in net.named_parameters() if "lora_B" in name]
    assert len(trained) == 14
    assert all(weight.any() for weight in trained)  # they begin with zeros
    assert not torch.allclose(net(input_ids=words).logits, without)
    merged = net.merge_and_unload().state_dict()
    assert merged.keys() == before.keys()
