"""`benchmarks/first_gpu_run.py`, over gloo; and on GPUs, where there are some."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LIMIT_S = 500.0
SHAPES = ["three stages", "two replicas of two stages", "unequal shares", "divided states"]
SHAPES += ["sharded checkpoint", "looped", "zero bubble", "recomputed", "compiled"]
NETWORKS = ["perceptron", "dropout", "batch norm", "transformer", "3D-ResAttNet"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # a script, which finds its neighbours beside it
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("first_gpu_run")


def differences(script: ModuleType, accelerator: str, ranks: int, part: str) -> tuple[float, float]:
    """Of stages from one device, and of one device from itself."""
    found = script.Run(accelerator, True, LIMIT_S, ranks).parts[f"exactness: {part}"]()
    assert "error" not in found, found
    driver = found["ranks"][0]
    shares = driver["two stages beside one device"], driver["one device beside itself"]
    return shares[0]["worst"], shares[1]["worst"]


@pytest.mark.conformance
@pytest.mark.distributed
def test_two_stages_are_compared_with_one_device(script: ModuleType) -> None:
    assert max(differences(script, "cpu", 2, "dropout, float64")) < 1e-12


def in_shape(script: ModuleType, accelerator: str, shape: str) -> float:
    """Of another shape from one device, and of a run that is resumed from one that is not."""
    found = script.Run(accelerator, True, LIMIT_S).parts[f"shapes: {shape}"]()
    assert "error" not in found, found
    driver = found["ranks"][0]
    return max(driver["beside one device"], driver["resumed beside not"])


@pytest.mark.conformance
@pytest.mark.distributed
def test_other_shapes_are_compared_with_one_device(script: ModuleType) -> None:
    assert in_shape(script, "cpu", "unequal shares") < 1e-12


def gpus(count: int) -> Any:
    there = torch.cuda.device_count()
    return pytest.mark.skipif(there < count, reason=f"wants {count} GPUs, and there are {there}")


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("network", ["perceptron", "batch norm"])
def test_one_gpu_trains_as_under_a_plain_trainer(script: ModuleType, network: str) -> None:
    hybrid, itself = differences(script, "gpu", 1, f"{network}, float64")
    assert hybrid <= max(1e-9, 2 * itself)


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("precision", ["float64", "bf16", "fp16"])
def test_two_gpus_or_two_ranks_of_one_train_as_one(
    script: ModuleType, network: str, precision: str
) -> None:
    stages, itself = differences(script, "gpu", 2, f"{network}, {precision}")
    assert stages <= max({"float64": 1e-9}.get(precision, 1e-2), 2 * itself)


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_gpus_train_in_other_shapes_as_one(script: ModuleType, shape: str) -> None:
    assert in_shape(script, "gpu", shape) < 1e-9


def test_a_part_that_is_not_over_in_time_or_fails_is_noted_and_the_others_go_on(
    script: ModuleType, tmp_path: Path
) -> None:
    def broken() -> Any:
        raise ValueError("on purpose")

    late = script.Run("cpu", True, 0.2).parts["exactness: dropout, float64"]
    out = tmp_path / "found.json"
    parts = {"late": late, "broken": broken, "whole": lambda: {"seconds": 1.0, "ranks": [{}]}}
    assert script.run(parts, out, {"quick": True}) == ["late", "broken"]
    found = json.loads(out.read_text())["parts"]
    assert found["late"]["error"] == "not over after 0 s: killed"
    assert found["late"]["exit codes"] == [None, None]
    assert found["broken"]["error"] == "ValueError: on purpose"
    assert "error" not in found["whole"]


def test_the_overlap_of_kernels_is_the_time_in_which_both_kinds_run(script: ModuleType) -> None:
    steps = importlib.import_module("_gpu_steps")
    kernels = [(0.0, 4.0, False), (1.0, 3.0, True), (2.0, 6.0, True), (5.0, 8.0, False)]
    assert steps.overlap(kernels) == {"NCCL": 5.0, "device": 7.0, "both": 4.0}


def test_what_two_ranks_on_one_gpu_do_not_show_is_said_and_no_run_begins_too_late(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run = script.Run("gpu", True, LIMIT_S, minutes=0.0)
    assert "two GPUs" in run.parts["H: two devices"]()["left out"]
    found = run.parts["B: two stages"]()
    assert "M = 8: not begun: 0 minutes are over" in found["error"]
    assert "not those of two" in str(script.table(found).caption)


@pytest.mark.conformance
@pytest.mark.distributed
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("parts", ["", "exactness;shapes;killed"])
def test_all_parts_run_over_gloo(script: ModuleType, tmp_path: Path, parts: str) -> None:
    out = tmp_path / "found.json"
    options = ["--quick", "--limit", "500", "--minutes", "40", "--parts", parts]
    script.main(["--accelerator", "cpu", "--out", str(out), *options])
    found = json.loads(out.read_text())["parts"]
    assert {name: part["error"] for name, part in found.items() if "error" in part} == {}
    if not parts:
        check_steps(found)
        return
    exact = {name: each for name, each in found.items() if name.endswith("float64")}
    assert len(exact) == len(NETWORKS)
    for name, each in exact.items():
        assert each["ranks"][0]["two stages beside one device"]["worst"] < 1e-9, name
    assert [found[f"killed: {name}"]["exit codes"] for name in ("driver", "worker")] == [
        [-9, 1],
        [1, -9],
    ]


def check_steps(found: dict[str, Any]) -> None:
    """Parts A to H: all that can be seen without a GPU."""
    left_out = {name[0] for name, part in found.items() if "left out" in part}
    assert left_out == {"E", "G"}
    ran = [run for part in found.values() for run in part.get("runs", {}).values()]
    assert len(ran) == 2 + 5 + 3 + 4 + 3 + 3
    for run in ran:
        driver = run["ranks"][0]
        assert driver["losses"][0] == pytest.approx(6.26, abs=0.1)
        assert all(rank["step, ms"] > 0 and rank["host, ms"] > 0 for rank in run["ranks"])
    for name in ("empty cache", "full cache"):
        start = found["F: the first step"]["runs"][name]["ranks"][0]["start"]
        assert "hybrid/start/profiling_and_planning_s" in start
