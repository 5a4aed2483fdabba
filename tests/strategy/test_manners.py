"""Errors that a script catches, threads, copies: as users know it from one device."""

from pathlib import Path
from typing import Any

import manners_script
import pytest
import torch
from conftest import DEFAULTS, Training
from manners_script import STEPS

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
SCRIPT = Path(__file__).with_name("manners_script.py")
slow = pytest.mark.conformance
FAULTS: dict[str, dict[str, Any]] = {
    # on a worker before its stage runs; the first one, since an operator stays once it is there
    "operator": {"where": "operator", "rank": 1},
    "training_step": {"where": "training_step", "rank": 0},
    "stage": {"where": "stage", "rank": 1},
    "setup of one": {"where": "setup", "rank": 1},
    "setup of all": {"where": "setup", "rank": None},
    "configure_optimizers": {"where": "configure_optimizers", "rank": 0},
}
OF_WORKERS = ("stage", "operator")
Ranks = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[(1, 2), *(pytest.param(shape, marks=slow) for shape in ((1, 3), (2, 2)))],
)
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Training:
    replicas, stages = request.param
    folder = tmp_path_factory.mktemp("manners")
    options = {"replicas": replicas, "stages": stages, "faults": FAULTS}
    training = Training(folder, script=SCRIPT, **options)
    training.seen = training.launch() if replicas > 1 else training.run()
    return training


@pytest.fixture
def ranks(training: Any) -> Ranks:
    """What each rank has seen, in one script with all faults."""
    return training.seen


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    faults = {n: {**fault, "rank": None} for n, fault in FAULTS.items() if n not in OF_WORKERS}
    config = {**DEFAULTS, "strategy": "auto", "stages": 1, "faults": faults}
    return manners_script.run(config, tmp_path_factory.mktemp("one_device"))


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_can_catch_what_one_has_raised(ranks: Ranks, fault: str) -> None:
    where = FAULTS[fault]["where"]
    for number, rank in enumerate(ranks):
        expected = "manners::same" if where == "operator" else f"on purpose in {where}"
        assert expected in rank[fault]["caught"]
        if FAULTS[fault]["rank"] not in (None, number):
            assert f"rank {FAULTS[fault]['rank']} (" in rank[fault]["cause"]
            assert "Traceback" in rank[fault]["cause"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_trained_before_an_error_is_on_every_rank(
    ranks: Ranks, training: Training, one_device: dict[str, Any], fault: str
) -> None:
    of_first_replica = ranks[: training.config["stages"]]
    for rank in of_first_replica:
        assert_equal(rank[fault]["left"], ranks[0][fault]["left"])
    if training.config["replicas"] == 1 and fault not in OF_WORKERS:
        assert_equal(ranks[0][fault]["left"], one_device[fault]["left"])


@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_train_on_after_an_error(
    ranks: Ranks, training: Training, one_device: dict[str, Any], fault: str
) -> None:
    for rank in ranks:
        assert_equal(rank[fault]["weights"], ranks[0][fault]["weights"])
        assert len(rank[fault]["losses"]) == STEPS
    if training.config["replicas"] == 1 and fault not in OF_WORKERS:
        assert_equal(ranks[0][fault]["losses"], one_device[fault]["losses"])
        assert_equal(ranks[0][fault]["weights"], one_device[fault]["weights"])


def test_no_thread_of_ours_outlives_a_run(ranks: Ranks) -> None:
    for rank in ranks:
        assert [seen["threads"] for seen in rank.values()] == [[]] * len(rank)


def test_callbacks_can_be_copied_in_a_hook(
    ranks: Ranks, training: Training, one_device: dict[str, Any]
) -> None:
    assert ranks[0]["copies"]["copies"] == one_device["copies"]["copies"] > 0
    if training.config["replicas"] == 1:
        assert_equal(ranks[0]["copies"]["weights"], one_device["copies"]["weights"])
