"""Every way to start the processes trains alike, and the script goes on alike on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, Training
from training_script import train

pytestmark = [
    pytest.mark.distributed,
    # Lightning's advice on workers of loaders
    pytest.mark.filterwarnings("ignore"),
]
STEPS, MORE_STEPS = 9, 3
CONFIG = {
    **DEFAULTS,
    "dtype": "float64",
    "stages": 2,
    "steps": STEPS,
    "checkpoint": {"monitor": "val"},
    "trainer": {},
}
LATER_LINES = {
    "after": "best",
    "again": MORE_STEPS,
    "then": {"after": None, "again": None, "seed": 1, "network": "dropout", "side": 4},
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHES: dict[str, dict[str, Any]] = {
    # the sizes are found: all devices form one chain
    "spawn": {"strategy": "hybrid_gabra_spawn", "processes": 1},
    "fork": {"strategy": "hybrid_gabra_fork", "processes": 1},
    "torchrun": {"strategy": "hybrid_gabra", "launcher": TORCHRUN},
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = {**CONFIG, **LATER_LINES, "strategy": "auto", "stages": 1}
    return train(config, tmp_path_factory.mktemp("one_device"))[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Both ranks of a script that starts the other process by itself."""
    return Training(tmp_path_factory.mktemp("popen"), **CONFIG, **LATER_LINES).run()


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_launch_trains_as_one_device(
    one_device: dict[str, Any], tmp_path: Path, launch: str
) -> None:
    for rank in Training(tmp_path, **{**CONFIG, **LAUNCHES[launch]}).run():
        assert_same(dict(rank["weights"]), dict(one_device["weights"]))
        assert_same(rank["metrics"], one_device["metrics"])
        assert Path(rank["best"]).is_file()


def test_later_lines_see_on_every_rank_what_one_device_sees(
    one_device: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert_same(dict(rank["weights"]), dict(one_device["weights"]))
        for key in ("metrics", "validation", "test", "predictions", "random", "step", "epoch"):
            assert_same(rank[key], one_device[key])
        assert Path(rank["best"]).name == Path(one_device["best"]).name
    assert ranks[0]["best"] == ranks[1]["best"]
    assert torch.equal(ranks[0]["random"], ranks[1]["random"])


def test_a_trainer_can_fit_again(one_device: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    expected = one_device["again"]
    assert_same(ranks[0]["again"]["losses"], expected["losses"])
    for rank in ranks:
        assert rank["again"]["step"] == STEPS + MORE_STEPS
        assert_same(dict(rank["again"]["weights"]), dict(expected["weights"]))


def test_a_second_trainer_works_in_the_same_processes(ranks: list[dict[str, Any]]) -> None:
    driver, worker = (rank["then"] for rank in ranks)
    assert driver["pid"] == ranks[0]["pid"]
    assert len(driver["losses"]) == STEPS
    assert_same(dict(driver["weights"]), dict(worker["weights"]))
