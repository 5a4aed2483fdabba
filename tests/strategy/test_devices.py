"""Unequal devices: ranks change places, the plan follows the speeds, the numbers stay."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, Training
from test_exact_training import one_device

pytestmark = [pytest.mark.distributed, pytest.mark.conformance]


def assert_trained(
    drivers: list[dict[str, Any]], losses: list[list[float]], weights: dict[str, torch.Tensor]
) -> None:
    for driver, expected in zip(drivers, losses, strict=True):
        assert torch.tensor(driver["losses"]) == pytest.approx(torch.tensor(expected), abs=1e-10)
        for name, value in driver["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-10, msg=name)


def test_ranks_that_change_places_train_as_one_device(tmp_path: Path) -> None:
    config = {**DEFAULTS, "dtype": "float64", "replicas": 2, "stages": 2, "steps": 6}
    losses, weights = one_device(config)
    training = Training(tmp_path, **config, capacity=[1, 1, 0.5, 0.5], after="best")
    drivers = training.run()
    assert [driver["coordinates"] for driver in drivers] == [
        "rank 0 (driver, replica 0, stage 1)",
        "rank 1 (driver, replica 1, stage 1)",
    ]
    assert training.ran_on_workers().keys() == {2, 3}
    assert_trained(drivers, losses, weights)
    assert drivers[0]["test"] == drivers[1]["test"]


@pytest.mark.parametrize(
    ("replicas", "devices", "ranks", "drivers"),
    [(2, [1, 0], [0, 2, 3, 1], [0, 3]), (1, [[1, 2], 0], [0, 2, 1], [0]), (1, [2, 1, 0], [], [0])],
    ids=["two replicas", "copies", "stages in another order"],
)
def test_a_plan_says_which_rank_has_which_stage(
    tmp_path: Path, replicas: int, devices: list[int], ranks: list[int], drivers: list[int]
) -> None:
    config = {**DEFAULTS, "dtype": "float64", "steps": 4, "replicas": replicas, "devices": devices}
    config |= {"stages": 2 if replicas == 2 else 3, "ranks": ranks}
    losses, weights = one_device(config)
    training = Training(tmp_path, **config)
    found = training.run()
    for rank, replica in zip(drivers, found, strict=True):
        assert replica["coordinates"].startswith(f"rank {rank} (driver")
    assert training.ran_on_workers().keys() == {*range(training.processes)} - {*drivers}
    assert_trained(found, losses, weights)


class Runs:
    """Two runs of a script, one after the other, with a cache of their own."""

    def __init__(self, folder: Path) -> None:
        config = {**DEFAULTS, "stages": 2, "steps": 2, "plan": None}
        config |= {"trainer": {"num_sanity_val_steps": 1}}
        self.drivers, self.files = [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LIGHTNING_HYBRID_CACHE", str(folder / "cache"))
            for name in ("first", "second"):
                self.drivers += Training(folder / name, **config).run()
                files = (folder / "cache" / "profiles").iterdir()
                self.files.append({file: file.stat().st_mtime_ns for file in files})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def test_the_next_run_takes_the_profile_of_the_first(runs: Runs) -> None:
    (file,) = runs.files[0]  # one network, one size of the micro-batch: the sanity check's too
    assert json.loads(file.read_text())["names"] == ["stem", "first", "second", "head"]
    assert runs.files[0] == runs.files[1]  # not written again


def test_devices_are_measured_on_all_ranks(runs: Runs) -> None:
    for driver in runs.drivers:
        cluster = driver["cluster"]
        assert len(cluster.speeds) == 2
        assert all(0 < speed < 4 for speed in cluster.speeds)
        assert all(memory > 1e6 for memory in cluster.memory_bytes)
        assert cluster.bandwidth_bytes_per_s > 1e6


def test_the_plan_shows_what_the_stages_hold(runs: Runs) -> None:
    plan = runs.drivers[0]["plan"]
    assert re.search(r"predicted step: [\d.]+ s", plan)
    assert re.search(r"memory.*\n.*\d GB", plan, re.DOTALL)
