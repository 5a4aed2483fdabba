"""Asynchronous replicas train as one process that applies the same pushes in the same order."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from asynchronous_script import data, network
from conftest import Training
from torch import Tensor, nn

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.conformance
SCRIPT = Path(__file__).with_name("asynchronous_script.py")
USUAL = {"replicas": 2, "stages": 1, "samples": 48, "batch": 4, "trainer": {}}


def train(folder: Path, arguments: dict[str, Any], **config: Any) -> list[dict[str, Any]]:
    """What each rank has seen."""
    return Training(folder, script=SCRIPT, **{**USUAL, "arguments": arguments, **config}).run()


def order(folder: Path) -> list[dict[str, int]]:
    with (folder / "asynchronous_order.csv").open() as file:
        return [{name: int(value) for name, value in line.items()} for line in csv.DictReader(file)]


def replay(folder: Path, ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The weights of one process that makes the recorded updates, with plain torch."""
    net, (x, y, _) = network(), data(48).tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    versions = [[p.detach().clone() for p in net.parameters()]]
    pushes = order(folder)
    steps = len(ranks[0]["seen"])
    for version in range(pushes[-1]["version"] + 1):
        sums = [torch.zeros_like(p) for p in net.parameters()]
        mine = [push for push in pushes if push["version"] == version]
        for push in mine:
            batch = ranks[push["replica"]]["seen"][push["push"]]
            old = dict(zip((n for n, _ in net.named_parameters()), versions[push["read"]]))
            old = {name: value.clone().requires_grad_() for name, value in old.items()}
            out = torch.func.functional_call(net, old, (x[batch],))
            loss = nn.functional.cross_entropy(out, y[batch])
            for total, part in zip(sums, torch.autograd.grad(loss, [*old.values()])):
                total += part / len(ranks)
        for parameter, total in zip(net.parameters(), sums):
            parameter.grad = total
        # the rate is halved after the first of two epochs
        optimizer.param_groups[0]["lr"] = 0.1 if mine[0]["push"] < steps // 2 else 0.05
        optimizer.step()
        versions.append([p.detach().clone() for p in net.parameters()])
    return {f"net.{name}": value for name, value in net.state_dict().items()}


@pytest.mark.parametrize("bound", [2, pytest.param(1, marks=slow), pytest.param(8, marks=slow)])
def test_weights_are_those_of_a_serial_replay_and_no_push_is_older_than_the_bound(
    tmp_path: Path, bound: int
) -> None:
    ranks = train(tmp_path, {"gradient_sync": "asgd", "staleness": bound}, stall=0.05)
    assert [rank["error"] for rank in ranks] == ["", ""]
    ages = [push["version"] - push["read"] for push in order(tmp_path)]
    assert 0 < max(ages) <= bound
    assert len(ages) == 2 * len(ranks[0]["seen"])
    expected = replay(tmp_path, ranks)
    for rank in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=1e-9)


def test_a_bound_of_0_is_the_synchronous_run_bit_for_bit(tmp_path: Path) -> None:
    ranks = train(tmp_path / "asgd", {"gradient_sync": "asgd", "staleness": 0}, stall=0.01)
    expected = train(tmp_path / "allreduce", {})
    assert [rank["error"] for rank in ranks + expected] == [""] * 4
    for rank, other in zip(ranks, expected):
        assert all(torch.equal(rank["weights"][n], other["weights"][n]) for n in other["weights"])


@slow
def test_three_replicas_are_replayed(tmp_path: Path) -> None:
    ranks = train(tmp_path, {"gradient_sync": "asgd", "staleness": 2}, stall=0.05, replicas=3)
    for name, value in replay(tmp_path, ranks).items():
        torch.testing.assert_close(ranks[2]["weights"][name], value, rtol=0, atol=1e-9)


@slow
def test_a_run_that_goes_on_from_a_fence_ends_where_one_run_does(tmp_path: Path) -> None:
    arguments = {"gradient_sync": "asgd", "staleness": 0}
    whole = train(tmp_path / "whole", arguments)
    train(tmp_path / "first", arguments, trainer={"max_epochs": 1})
    path = str(tmp_path / "first/checkpoints/step=6.ckpt")
    then = train(tmp_path / "then", arguments, ckpt_path=path)
    assert [rank["error"] for rank in then] == ["", ""]
    for name, value in whole[0]["weights"].items():
        assert torch.equal(then[1]["weights"][name], value)


@slow
@pytest.mark.parametrize("replica", [0, 1])
def test_an_error_of_one_replica_ends_all(tmp_path: Path, replica: int) -> None:
    ranks = train(tmp_path, {"gradient_sync": "asgd", "staleness": 2}, fails=replica)
    assert all("the third step fails" in rank["error"] for rank in ranks)


@slow
@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_that_dies_ends_all(tmp_path: Path, replica: int) -> None:
    arguments = {"gradient_sync": "asgd", "staleness": 2}
    run = Training(
        tmp_path, script=SCRIPT, **{**USUAL, "arguments": arguments, "dies": replica}
    ).start()
    assert run.wait(timeout=90) != 0 or replica == 1


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"adam": True}, "Adam"),
        pytest.param({"trainer": {"accumulate_grad_batches": 2}}, "accumulate", marks=slow),
        pytest.param({"trainer": {"gradient_clip_val": 1.0}}, "gradient_clip_val", marks=slow),
        pytest.param({"stages": 2, "replicas": 1}, "pipeline_parallel_size=2", marks=slow),
    ],
    ids=str,
)
def test_what_needs_the_replicas_together_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    ranks = train(tmp_path, {"gradient_sync": "asgd", "staleness": 1}, **config)
    assert all(named in rank["error"] for rank in ranks)
