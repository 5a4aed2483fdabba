"""Where one device has no room for a network, stages train it, save it, end, and go on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, USUAL

pytestmark = [pytest.mark.distributed, pytest.mark.conformance]
SCRIPT = ROOT / "benchmarks" / "large_models.py"
LAYERS, LIMIT_MIB = 40, 2440
"""Measured with torch 2.13, in MiB: 640 of weights, as much for gradients, twice for Adam are what
one device needs in a step, and no more than 2600 with all else. Two stages that go on from a
checkpoint (three times the weights, of which the driver reads those of the others where it has no
memory for them) need about 2300 on the driver, where TorchDynamo takes its part. The two come
apart with the size of the network: with 384 MiB of weights they were 1500 and 1650."""
FRUGAL = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Else C's allocator keeps address space for each thread, and of what was freed."""


def run(
    folder: Path, peer: str, *more: str, limit_mib: int = LIMIT_MIB, reads: bool = True
) -> list[dict[str, Any]]:
    """What each rank has seen."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), "--run", peer, "--out", str(folder)]
    command += ["--fit-alone", "--layers", f"{LAYERS}", "--limit-mib", f"{limit_mib}"]
    command += [*(["--read"] if reads else []), *more]
    environment = os.environ | USUAL | FRUGAL
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One device without a limit."""
    [seen] = run(tmp_path_factory.mktemp("alone"), "one device", limit_mib=0)
    return seen


def test_one_device_has_no_room(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="can't allocate memory"):
        run(tmp_path, "one device")


@pytest.mark.parametrize("where", ["__init__", "configure_model"])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_have_room_for_a_whole_run_and_to_go_on_from_its_checkpoint(
    tmp_path: Path, alone: dict[str, Any], stages: int, where: str
) -> None:
    peer, reads = f"hybrid {stages} {where}", where == "__init__"
    resumes = ["--resume", f"{tmp_path}/saved.ckpt"]
    first = run(tmp_path, peer, reads=reads)
    second = run(tmp_path / "on", peer, *resumes, reads=reads)
    # (in the middle of an epoch Lightning goes on with the first batch of the loader)
    [alone_on] = run(tmp_path / "alone", "one device", *resumes, limit_mib=0)
    for ranks, one in ((first, alone), (second, alone_on)):
        assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=1e-6)
        for rank, seen in enumerate(ranks):
            assert seen["after"].keys() <= one["after"].keys()
            expected = {name: one["after"][name] for name in seen["after"]}
            assert seen["after"] == pytest.approx(expected, rel=1e-5), rank
        assert not reads or ranks[0]["after"].keys() == one["after"].keys()
