"""Unequal devices: ranks change places, the plan follows the speeds, the numbers stay."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import DEFAULTS, Training
from test_exact_training import one_device

pytestmark = [pytest.mark.distributed, pytest.mark.conformance]


def test_ranks_that_change_places_train_as_one_device(tmp_path: Path) -> None:
    config = {**DEFAULTS, "dtype": "float64", "replicas": 2, "stages": 2, "steps": 6}
    losses, weights = one_device(config)
    ranks = Training(tmp_path, **config, capacity=[1, 1, 0.5, 0.5], after="best").run()
    assert [rank["coordinates"] for rank in ranks] == [
        "rank 0 (driver, replica 0, stage 1)",
        "rank 1 (driver, replica 1, stage 1)",
        "rank 2 (worker, replica 0, stage 0)",
        "rank 3 (worker, replica 1, stage 0)",
    ]
    for replica in (0, 1):
        found = torch.tensor(ranks[replica]["losses"])
        assert found == pytest.approx(torch.tensor(losses[replica]), abs=1e-10)
    for rank in ranks:
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-10, msg=name)
        assert rank["test"] == ranks[0]["test"]


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
    found = Training(tmp_path, **config).run()
    said = [rank["coordinates"] for rank in found]
    assert [k for k, text in enumerate(said) if "driver" in text] == drivers
    for replica, driver in enumerate(drivers):
        mine = torch.tensor(found[driver]["losses"])
        assert mine == pytest.approx(torch.tensor(losses[replica]), abs=1e-10)
    for rank in found:
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-10, msg=name)


class Runs:
    """Two runs of a script, one after the other, with a cache of their own."""

    def __init__(self, folder: Path) -> None:
        config = {**DEFAULTS, "stages": 2, "steps": 2, "plan": None}
        config |= {"trainer": {"num_sanity_val_steps": 1}}
        self.ranks, self.files = [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LIGHTNING_HYBRID_CACHE", str(folder / "cache"))
            for name in ("first", "second"):
                self.ranks.append(Training(folder / name, **config).run())
                files = (folder / "cache" / "profiles").iterdir()
                self.files.append({file: file.stat().st_mtime_ns for file in files})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def test_the_next_run_takes_the_profile_of_the_first(runs: Runs) -> None:
    (file,) = runs.files[0]  # one network, one size of the micro-batch: the sanity check's too
    assert json.loads(file.read_text())["of"]["inputs"][0][0] == [2, 1, 8, 8, 8]
    assert runs.files[0] == runs.files[1]  # not written again


def test_devices_are_measured_on_all_ranks(runs: Runs) -> None:
    for driver, worker in runs.ranks:
        cluster = driver["cluster"]
        assert cluster == worker["cluster"]
        assert len(cluster.speeds) == 2
        assert all(0 < speed < 4 for speed in cluster.speeds)
        assert all(memory > 1e6 for memory in cluster.memory_bytes)
        assert cluster.bandwidth_bytes_per_s > 1e6


def test_the_plan_shows_what_the_stages_hold(runs: Runs) -> None:
    plan = runs.ranks[0][0]["plan"]
    assert re.search(r"predicted step: [\d.]+ s", plan)
    assert re.search(r"memory.*\n.*\d GB", plan, re.DOTALL)
    assert plan == runs.ranks[0][1]["plan"]
