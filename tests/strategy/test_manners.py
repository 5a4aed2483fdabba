"""Errors that a script catches, threads, copies: as users know it from one device."""

import contextlib
import re
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
    "training_step": {"where": "training_step", "rank": 0},
    "stage": {"where": "stage", "rank": 1},  # or another worker
    "setup of one": {"where": "setup", "rank": 2},  # a driver, where there are two replicas
    "setup of all": {"where": "setup", "rank": None},
    "configure_optimizers": {"where": "configure_optimizers", "rank": 0},
}
UNTRAINED = ("setup of one", "setup of all", "configure_optimizers")
Drivers = list[dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[(1, 2), *(pytest.param(shape, marks=slow) for shape in ((1, 3), (2, 2)))],
)
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Training:
    replicas, stages = request.param
    folder = tmp_path_factory.mktemp("manners")
    faults = {name: fault for name, fault in FAULTS.items() if replicas > 1 or fault["rank"] != 2}
    options = {"replicas": replicas, "stages": stages, "faults": faults}
    training = Training(folder, script=SCRIPT, **options)
    training.seen = training.launch() if replicas > 1 else training.run()
    assert len(training.seen) == replicas
    return training


@pytest.fixture
def drivers(training: Any) -> Drivers:
    """What each driver has seen, in one script with all faults."""
    return training.seen


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest, training: Training) -> str:
    if request.param not in training.config["faults"]:
        pytest.skip("there is one driver")
    return request.param


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    faults = {name: {**fault, "rank": None} for name, fault in FAULTS.items()}
    config = {**DEFAULTS, "strategy": "auto", "stages": 1, "faults": faults}
    folder = tmp_path_factory.mktemp("one_device")
    with contextlib.chdir(folder):
        return manners_script.run(config, folder)


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_every_driver_can_catch_what_a_rank_has_raised(
    drivers: Drivers, training: Training, fault: str
) -> None:
    where, rank = FAULTS[fault].values()
    stages = training.config["stages"]
    for replica, driver in enumerate(drivers):
        assert f"on purpose in {where}" in driver[fault]["caught"]
        if rank not in (None, replica * stages):
            place = r"rank \d \(worker" if where == "stage" else rf"rank {rank} \(driver"
            assert re.search(place, driver[fault]["cause"])
            assert "Traceback" in driver[fault]["cause"]


def test_what_was_trained_before_an_error_is_on_the_driver(
    drivers: Drivers, one_device: dict[str, Any], fault: str
) -> None:
    if len(drivers) == 1 or fault in UNTRAINED:
        for driver in drivers:
            assert_equal(driver[fault]["left"], one_device[fault]["left"])


def test_all_ranks_train_on_after_an_error(
    drivers: Drivers, one_device: dict[str, Any], fault: str
) -> None:
    for driver in drivers:
        assert_equal(driver[fault]["weights"], drivers[0][fault]["weights"])
        assert len(driver[fault]["losses"]) == STEPS
    lacking = {driver[fault].get("refused") for driver in drivers}
    assert len(lacking) == 1
    assert lacking == {None} or any(driver[fault]["left"] is None for driver in drivers)
    if len(drivers) == 1:
        assert lacking == {None}
        assert_equal(drivers[0][fault]["losses"], one_device[fault]["losses"])
        assert_equal(drivers[0][fault]["weights"], one_device[fault]["weights"])


def test_no_thread_of_ours_outlives_a_run(drivers: Drivers) -> None:
    for driver in drivers:
        assert [seen["threads"] for seen in driver.values()] == [[]] * len(driver)


def test_callbacks_can_be_copied_in_a_hook(drivers: Drivers, one_device: dict[str, Any]) -> None:
    assert drivers[0]["copies"]["copies"] == one_device["copies"]["copies"] > 0
    if len(drivers) == 1:
        assert_equal(drivers[0]["copies"]["weights"], one_device["copies"]["weights"])
