"""Loops of Fabric with a device for each of its processes, against plain Fabric on CPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = ROOT / "tests" / "strategy" / "fabric_script.py"
Seen = dict[str, dict[int, Any]]
"""Of each loop, what the driver of each replica has seen."""


def run(folder: Path, loops: Sequence[str], replicas: int, stages: int, **more: Any) -> Seen:
    """On devices; without stages plain Fabric, on CPUs unless an accelerator is given."""
    folder.mkdir()
    accelerator = more.pop("accelerator", "gpu" if stages else "cpu")
    paths = [HERE / "at_start"] if accelerator == "gpu" else []
    config = {"loops": [*loops], "replicas": replicas, "stages": stages, "options": {}, **more}
    (folder / "config.json").write_text(json.dumps({**config, "accelerator": accelerator}))
    paths += [ROOT, ROOT / "tests" / "helpers"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, paths))},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen: Seen = {}
    for name in loops:
        paths = [*folder.glob(f"{name}.*.pt")]
        assert len(paths) == replicas
        for path in paths:
            found = torch.load(path, weights_only=False)
            seen.setdefault(name, {})[int(path.suffixes[0][1:])] = found
    return seen


ALL = [
    *("clips_by_norm_and_evaluates", "accumulates_under_a_scheduler", "saves_and_loads"),
    *("penalises_weights_before_the_call", "steps_with_a_closure", "speaks_to_other_ranks"),
    *("trains_what_the_script_keeps", "scales_its_loss"),
]


@pytest.mark.parametrize(
    ("replicas", "stages", "loops"),
    [
        (1, 2, ALL),
        (2, 2, ALL),
        (2, 1, ["accumulates_under_a_scheduler", "scales_its_loss"]),
        (1, 3, ["saves_and_loads", "scales_its_loss"]),
    ],
)
def test_loops_on_devices_have_the_numbers_of_plain_fabric(
    tmp_path: Path, replicas: int, stages: int, loops: list[str]
) -> None:
    expected = run(tmp_path / "plain", loops, replicas, 0)
    found = run(tmp_path / "staged", loops, replicas, stages)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_half_precision_is_that_of_one_device(tmp_path: Path) -> None:
    loops = ["trains_in_half_precision"]
    expected = run(tmp_path / "plain", loops, 1, 0, accelerator="gpu")
    found = run(tmp_path / "staged", loops, 1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_model_that_no_device_has_room_for_waits_on_the_cpu_until_it_is_cut(
    tmp_path: Path,
) -> None:
    loops = ["clips_by_norm_and_evaluates", "saves_and_loads", "scales_its_loss"]
    expected = run(tmp_path / "plain", loops, 1, 0)
    found = run(tmp_path / "staged", loops, 1, 2, waits=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
