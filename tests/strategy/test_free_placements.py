"""Several stages on one device train as one device does."""

import re
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
    folder: Path, replicas: int, devices: list[int], settings: dict[str, Any]
) -> tuple[Training, list[dict[str, Any]]]:
    """Train in float64 and compare losses and weights. Returns what each driver has seen, too."""
    config = {
        **DEFAULTS,
        **settings,
        "dtype": "float64",
        "replicas": replicas,
        "stages": max(devices) + 1,
        "devices": devices,
    }
    losses, weights = one_device(config)
    training = Training(folder, **config)
    drivers = training.run()
    for driver, expected in zip(drivers, losses, strict=True):
        assert torch.tensor(driver["losses"]) == pytest.approx(torch.tensor(expected), abs=1e-10)
        for part, value in driver["weights"].items():
            torch.testing.assert_close(value, weights[part], rtol=1e-10, atol=1e-10, msg=part)
    assert_each_stage_worked_alone(training, drivers)
    return training, drivers


@pytest.mark.conformance
def test_devices_that_take_turns_train_as_one_device(tmp_path: Path) -> None:
    """Two replicas of a loop; each device trains the stages that the plan gives it."""
    training, drivers = assert_trains_as_one_device(tmp_path, 2, [1, 0, 1, 0], {})
    assert [owned(driver) for driver in drivers] == 2 * [{"first", "head"}]
    assert training.ran_on_workers() == {rank: {"stem", "norm", "second"} for rank in (1, 3)}
    assert "2 replicas x 2 devices with 4 stages = 4 devices" in drivers[0]["plan"]


def owned(driver: dict[str, Any]) -> set[str]:
    """The modules whose parameters have got gradients there."""
    return {name.rpartition(".")[0] for name in driver["gradients"]}


@pytest.mark.conformance
@pytest.mark.parametrize("name", CASES)
def test_any_placement_trains_as_one_device(tmp_path: Path, name: str) -> None:
    assert_trains_as_one_device(tmp_path, *CASES[name])


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
    free = {"stages": 2, "plan": None, "contiguous": False, "after": "best"}
    training = Training(tmp_path / "free", **{**config, **free})
    [driver] = training.run()
    path = tmp_path / "free/checkpoints/step=6.ckpt"
    _, resumed = train({**alone, "after": None, "ckpt_path": str(path)}, tmp_path / "resumed")

    def assert_close(found: Any, wanted: Any) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)

    # by what was measured the best chain may be shorter than what was bred
    assert re.search("allocation: (gabra|dynamic)", driver["plan"])
    assert_close(dict(driver["weights"]), dict(expected["weights"]))
    assert_close(driver["validation"], expected["validation"])
    assert_close(torch.cat(driver["predictions"]), torch.cat(expected["predictions"]))
    assert_close(driver["losses"], expected["losses"])
    assert_close(resumed["losses"], expected["losses"][6:])
    assert_close(dict(resumed["weights"]), dict(expected["weights"]))
    [ran] = training.ran_on_workers().values()
    assert ran
    assert owned(driver)
    assert not ran & owned(driver)
