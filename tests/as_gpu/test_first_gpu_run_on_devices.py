"""`benchmarks/first_gpu_run.py` as on a machine with GPUs, of which nobody here has any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "benchmarks" / "first_gpu_run.py"


def test_its_parts_run_on_devices(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    parts = "environment;A;G;exactness: batch norm, bf16"
    options = ["--parts", parts, "--out", str(out), "--layers", "2"]
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
    [one, blocking] = [part["runs"] for part in found.values() if "runs" in part]
    assert one["plain"]["ranks"][0]["losses"] == one["hybrid 1x1"]["ranks"][0]["losses"]
    assert [*blocking] == ["gpipe", "1f1b"]
    for run in blocking.values():
        assert all(rank["peak, MiB"] > 0 for rank in run["ranks"])
        # (micro-batches are rounded otherwise in bfloat16)
        plain = one["plain"]["ranks"][0]["losses"]
        assert run["ranks"][0]["losses"] == pytest.approx(plain, rel=1e-2)
