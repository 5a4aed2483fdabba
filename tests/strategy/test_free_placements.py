"""Several stages on one device train as one device does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, Training
from test_exact_training import assert_each_stage_worked_alone, one_device
from training_script import train

pytestmark = [
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders
    pytest.mark.filterwarnings("ignore"),
]
Train = Callable[..., list[dict[str, Any]]]
slow = pytest.mark.conformance
RANDOM = {"network": "dropout", "side": 4}
BATCH_NORM = {"network": "resattnet", "side": 24, "batch": 4, "samples": 16}
CASES: dict[str, tuple[int, list[int], dict[str, Any]]] = {
    # replicas, device of each stage, settings
    "the driver has both ends": (1, [0, 1, 0], {}),
    "a loop": (1, [1, 0, 1, 0], {}),
    "a loop, random layers": (1, [1, 0, 1, 0], RANDOM),
    "neighbours on one device": (1, [1, 1, 0, 0], {}),
    "another order": (1, [2, 1, 0], {}),
    "replicas of a loop": (2, [1, 0, 1, 0], {}),
    "three devices": (1, [1, 2, 1, 0, 0], BATCH_NORM),
    "three devices in a mixed order": (1, [2, 0, 1, 2, 0], BATCH_NORM),
    "replicas, batch norm": (2, [1, 0, 1, 0, 0], BATCH_NORM),
    "replicas, random layers": (2, [0, 1, 0], RANDOM),
}
FAST = ("a loop", "a loop, random layers", "the driver has both ends", "replicas of a loop")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=slow) for n in CASES])
def test_losses_and_weights_are_those_of_one_device(train: Train, name: str) -> None:
    replicas, devices, settings = CASES[name]
    config = {
        **DEFAULTS,
        **settings,
        "dtype": "float64",
        "replicas": replicas,
        "stages": max(devices) + 1,
        "devices": devices,
    }
    losses, weights = one_device(config)
    ranks = train(**config)
    for replica in range(replicas):
        found = ranks[replica * config["stages"]]["losses"]
        assert torch.tensor(found) == pytest.approx(torch.tensor(losses[replica]), abs=1e-10)
    for rank in ranks:
        for part, value in rank["weights"].items():
            torch.testing.assert_close(value, weights[part], rtol=1e-10, atol=1e-10, msg=part)
    assert_each_stage_worked_alone(ranks, config)


def test_each_device_trains_the_stages_that_the_plan_gives_it(train: Train) -> None:
    driver, worker = train(stages=2, devices=[1, 0, 1, 0], steps=2)
    owned = [{n.rpartition(".")[0] for n in rank["gradients"]} for rank in (driver, worker)]
    assert owned == [{"first", "head"}, {"stem", "norm", "second"}]
    assert "2 devices with 4 stages = 2 devices" in driver["plan"]


def test_gabra_may_give_a_device_several_stages(tmp_path: Path) -> None:
    """All of a run: planned, trained, validated, saved, and resumed on one device."""
    torch.set_num_threads(1)
    config = {
        **DEFAULTS,
        "dtype": "float64",
        "goes_on": True,
        "steps": 12,
        "trainer": {"num_sanity_val_steps": 1, "val_check_interval": 0.5},
        "checkpoint": {"monitor": "val", "filename": "{step}", "save_top_k": -1},
    }
    alone = {**config, "strategy": "auto", "after": "best"}
    _, expected = train(alone, tmp_path / "one")
    ranks = Training(
        tmp_path / "free",
        **{**config, "stages": 2, "allocation": "gabra", "contiguous": False, "after": "best"},
    ).run()
    path = tmp_path / "free/checkpoints/step=6.ckpt"
    _, resumed = train({**alone, "after": None, "ckpt_path": str(path)}, tmp_path / "resumed")

    def assert_close(found: Any, wanted: Any) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)

    for rank in ranks:
        assert "allocation: gabra" in rank["plan"]
        assert_close(dict(rank["weights"]), dict(expected["weights"]))
        assert_close(rank["validation"], expected["validation"])
        assert_close(torch.cat(rank["predictions"]), torch.cat(expected["predictions"]))
    assert_close(ranks[0]["losses"], expected["losses"])
    assert_close(resumed["losses"], expected["losses"][6:])
    assert_close(dict(resumed["weights"]), dict(expected["weights"]))
    owned = [set(rank["gradients"]) for rank in ranks]
    assert all(owned)
    assert not owned[0] & owned[1]
