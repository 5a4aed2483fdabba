"""`benchmarks/first_gpu_run.py` as on a machine with GPUs, of which nobody here has any."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "benchmarks" / "first_gpu_run.py"


def test_its_parts_run_on_devices(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = ["--parts", "environment;exactness: batch norm, bf16;memory", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--limit", "250", *options],
        env=os.environ | {"PYTHONPATH": f"{HERE / 'at_start'}:{HERE.parents[1]}"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["parts"]
    assert not [name for name, part in found.items() if "error" in part], done.stdout
    assert [device["name"] for device in found["environment"]["devices"]] == ["emulated GPU"] * 4
    [exact] = [part for name, part in found.items() if name.startswith("exactness")]
    assert exact["ranks"][0]["two stages beside one device"]["worst"] < 1e-6
    for rank in found["memory"]["ranks"]:
        held = rank["max_memory_allocated in steady steps"]
        # (the rest are inputs, gradients on their way: the network is tiny)
        assert rank["planned bytes"] / 2 < held < 2 * rank["planned bytes"]
