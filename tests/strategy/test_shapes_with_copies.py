"""Copies of a stage, in processes: the numbers of one device, and the same bits in all owners."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEFAULTS, Training
from test_exact_training import SETTINGS, one_device

from lightning_hybrid import BySpeed, Equal, HybridGabraStrategy, Plan, Search, Sharded
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.copied_stages import devices_of_copies

pytestmark = pytest.mark.distributed
Train = Callable[..., list[dict[str, Any]]]
slow = pytest.mark.conformance


@pytest.mark.parametrize(
    ("replicas", "copies", "network"),
    [
        (1, (2, 1), "residual"),
        *(
            pytest.param(*shape, marks=slow)
            for shape in [
                (1, (3, 1), "dropout"),
                (1, (1, 2, 1), "residual"),
                (1, (2, 1), "resattnet"),
                (2, (2, 1), "residual"),
                (1, (1, 2), "residual"),
                (1, (1, 2), "resattnet"),
                (1, (1, 3), "dropout"),
                (1, (2, 2), "resattnet"),
                (1, (1, 1, 2), "residual"),
                (2, (1, 2), "residual"),
            ]
        ),
    ],
)
def test_losses_and_weights_are_those_of_one_device(
    tmp_path: Path, replicas: int, copies: tuple[int, ...], network: str
) -> None:
    config = {
        **DEFAULTS,
        **SETTINGS.get(network, {"side": 4 if network == "dropout" else 8}),
        "network": network,
        "dtype": "float64",
        "steps": 6,
        "replicas": replicas,
        "stages": sum(copies),
    }
    if network != "resattnet":
        config |= {"microbatches": 5, "batch": 5, "samples": 20 * replicas}
    losses, weights = one_device(config)
    training = Training(tmp_path, **config, copies=copies)
    for driver, expected in zip(training.run(), losses, strict=True):
        found = torch.tensor(driver["losses"])
        assert found == pytest.approx(torch.tensor(expected), abs=1e-10)
        for name, value in driver["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-10, msg=name)
    ran = training.ran_on_workers()
    stages = [[ran[rank] for rank in owners if rank] for owners in devices_of_copies(copies)]
    workers = [each for each in stages if each]
    assert all(len(set(map(frozenset, each))) == 1 for each in workers)  # on the same weights
    assert not set.intersection(*(each[0] for each in workers)) or len(workers) == 1


@slow
@pytest.mark.parametrize("copies", [(2, 1), (1, 2)])
def test_cuts_that_are_chosen_for_a_shape_give_the_numbers_of_one_device(
    train: Train, copies: tuple[int, int]
) -> None:
    config = {
        **DEFAULTS,
        "dtype": "float64",
        "steps": 4,
        "stages": 3,
        "microbatches": 4,
        "batch": 4,
        "samples": 16,
    }
    losses, weights = one_device(config)
    ranks = train(**config, copies=copies, plan=None)
    assert ranks[0]["losses"] == pytest.approx(losses[0], abs=1e-10)
    for name, value in ranks[0]["weights"].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-10, msg=name)
    assert "-".join(map(str, copies)) in ranks[0]["plan"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"pipeline_parallel_size": (0, 1)}, r"pipeline_parallel_size=\(0, 1\) must be"),
        (
            {"schedule": "1f1b_stream"},
            "go together with schedule='1f1b_stream'. .* use pipeline_parallel_size=4",
        ),
        ({"schedule": "looped"}, "go together with schedule='looped'"),
        ({"search": Search(contiguous=False)}, r"with search=Search\(contiguous=False\)"),
        ({"replicas": BySpeed()}, r"go together with replicas=BySpeed\(\)"),
        ({"replicas": Equal(shard_states=True)}, r"with replicas=Equal\(shard_states=True\)"),
        ({"checkpoint": Sharded()}, r"go together with checkpoint=Sharded\(\)"),
        ({"rng": "device"}, "go together with rng='device'"),
    ],
)
def test_what_does_not_go_together_with_copies_is_refused(
    asked: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        HybridGabraStrategy(**{"pipeline_parallel_size": (3, 1), **asked})


def test_a_plan_with_copies_under_another_schedule_is_refused() -> None:
    plan = Plan(
        replicas=1,
        stages=2,
        microbatches=4,
        schedule="zero_bubble",
        cuts=("b",),
        devices=((1, 2), 0),
    )
    with pytest.raises(PlanError, match="go together with schedule='zero_bubble'"):
        HybridGabraStrategy(plan=plan)
