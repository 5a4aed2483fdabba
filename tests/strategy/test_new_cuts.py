"""A slow device gets less to do in the next epoch, and numbers stay those of one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Training

from lightning_hybrid import Sharded

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.conformance
SCRIPT = Path(__file__).with_name("new_cuts_script.py")
USUAL = {"replicas": 1, "stages": 2, "true": [1.0, 0.2], "trainer": {}}


def training(folder: Path, **config: Any) -> Training:
    return Training(folder, script=SCRIPT, **{**USUAL, **config})


def one_device(folder: Path, **config: Any) -> dict[str, Any]:
    """What a run on one device has seen."""
    run = Training(
        folder / "alone",
        script=SCRIPT,
        processes=1,
        **{**USUAL, **config, "alone": True, "replicas": 1, "stages": 1},
    )
    [seen] = run.run()
    return seen


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@slow
def test_the_slowest_device_of_the_replicas_of_a_stage_counts(tmp_path: Path) -> None:
    config = {"replicas": 2, "true": [[1.0, 1.0], [1.0, 0.2]]}
    run = training(tmp_path, **config)
    drivers = run.run()
    assert [driver["error"] for driver in drivers] == ["", ""]
    first, second, third = drivers[0]["cuts"]
    assert first != second == third
    assert drivers[1]["cuts"] == drivers[0]["cuts"]
    assert "rank 3 is 5.0 times slower" in run.output
    expected = one_device(tmp_path, loaded=2)
    losses = [(a + b) / 2 for a, b in zip(*(driver["losses"] for driver in drivers))]
    assert_same(losses, expected["losses"])
    assert_same(drivers[0]["optimizer"], expected["optimizer"])
    for driver in drivers:
        assert_same(driver["weights"], expected["weights"])


@slow
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"deferred": True},
            "changes nothing in this run: a network that is made in configure_model is whole on "
            "no rank",
        ),
        ({"registers": True}, "'again' is another parameter than at the beginning of the run"),
    ],
)
def test_where_cuts_stay_a_line_says_why(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    run = training(tmp_path, **config)
    [driver] = run.run()
    assert not driver["error"]
    assert len(set(driver["cuts"])) == 1
    assert run.output.count(reason) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"validates": True},
        pytest.param({"tied": True}, marks=slow),
        pytest.param({"manual": True}, marks=slow),
        pytest.param({"hooks": True}, marks=slow),
        pytest.param({"averages": True, "validates": True}, marks=slow),
        pytest.param({"trainer": {"gradient_clip_val": 0.05}}, marks=slow),
        pytest.param({"trainer": {"accumulate_grad_batches": 5}}, marks=slow),
        pytest.param({"stages": 3, "true": [1.0, 0.2, 1.0]}, marks=slow),
        pytest.param({"arguments": {"checkpoint": Sharded(asynchronous=True)}}, marks=slow),
        pytest.param({"arguments": {"log_performance": True}}, marks=slow),
    ],
    ids=str,
)
def test_numbers_are_those_of_one_device_before_and_after_new_cuts(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    run = training(tmp_path, **config)
    [driver] = run.run()
    assert not driver["error"]
    first, second, third = driver["cuts"]
    assert first != second == third
    assert run.output.count("replan='epoch': network 'net' is cut before") == 1
    assert "rank 1 is 5.0 times slower, compared with the others, than planned" in run.output
    expected = one_device(tmp_path, **config)
    for name in ("losses", "norms", "weights", "validated", "optimizer"):
        assert_same(driver[name], expected[name])
