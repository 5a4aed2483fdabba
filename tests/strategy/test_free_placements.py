"""Several stages on one device train as one device does."""

import re
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
RANDOM = {"network": "dropout", "side": 4}
BATCH_NORM = {"network": "resattnet", "side": 24, "batch": 4, "samples": 16, "steps": 6}
CASES: dict[str, tuple[int, list[int], dict[str, Any]]] = {
    # replicas, device of each stage, settings
    "the driver has both ends": (1, [0, 1, 0], {}),
    "a loop, random layers": (1, [1, 0, 1, 0], RANDOM),
    "neighbours on one device": (1, [1, 1, 0, 0], {}),
    "another order": (1, [2, 1, 0], {}),
    "three devices": (1, [1, 2, 1, 0, 0], BATCH_NORM),
    "three devices in a mixed order": (1, [2, 0, 1, 2, 0], BATCH_NORM),
    "replicas, batch norm": (2, [1, 0, 1, 0, 0], BATCH_NORM),
    "replicas, random layers": (2, [0, 1, 0], RANDOM),
}


def assert_trains_as_one_device(
    train: Train, replicas: int, devices: list[int], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Train in float64 and compare losses and weights. Returns what each rank has seen."""
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
    return ranks


@pytest.mark.conformance
def test_devices_that_take_turns_train_as_one_device(train: Train) -> None:
    """Two replicas of a loop; each device trains the stages that the plan gives it."""
    ranks = assert_trains_as_one_device(train, 2, [1, 0, 1, 0], {})
    owned = [{n.rpartition(".")[0] for n in rank["gradients"]} for rank in ranks]
    assert owned == 2 * [{"first", "head"}, {"stem", "norm", "second"}]
    assert "2 replicas x 2 devices with 4 stages = 4 devices" in ranks[0]["plan"]


@pytest.mark.conformance
@pytest.mark.parametrize("name", CASES)
def test_any_placement_trains_as_one_device(train: Train, name: str) -> None:
    assert_trains_as_one_device(train, *CASES[name])


@pytest.mark.conformance
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
        **{**config, "stages": 2, "plan": None, "contiguous": False, "after": "best"},
    ).run()
    path = tmp_path / "free/checkpoints/step=6.ckpt"
    _, resumed = train({**alone, "after": None, "ckpt_path": str(path)}, tmp_path / "resumed")

    def assert_close(found: Any, wanted: Any) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)

    for rank in ranks:
        # by what was measured the best chain may be shorter than what was bred
        assert re.search("allocation: (gabra|dynamic)", rank["plan"])
        assert_close(dict(rank["weights"]), dict(expected["weights"]))
        assert_close(rank["validation"], expected["validation"])
        assert_close(torch.cat(rank["predictions"]), torch.cat(expected["predictions"]))
    assert_close(ranks[0]["losses"], expected["losses"])
    assert_close(resumed["losses"], expected["losses"][6:])
    assert_close(dict(resumed["weights"]), dict(expected["weights"]))
    owned = [set(rank["gradients"]) for rank in ranks]
    assert all(owned)
    assert not owned[0] & owned[1]
