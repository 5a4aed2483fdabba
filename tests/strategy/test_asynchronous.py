"""Asynchronous replicas train as one process that applies the same pushes in the same order."""

import csv
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from asynchronous_script import data, network, rate
from conftest import Training
from torch import Tensor, nn

from lightning_hybrid import Asynchronous

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.conformance
SCRIPT = Path(__file__).with_name("asynchronous_script.py")
USUAL = {"replicas": 2, "samples": 48, "batch": 4, "trainer": {}}


def training(folder: Path, staleness: int, **config: Any) -> Training:
    arguments = {"replicas": Asynchronous(staleness=staleness)}
    return Training(folder, script=SCRIPT, **{**USUAL, "arguments": arguments, **config})


def train(folder: Path, staleness: int, **config: Any) -> list[dict[str, Any]]:
    """What each driver has seen."""
    return training(folder, staleness, **config).run()


def order(folder: Path) -> list[dict[str, int]]:
    with (folder / "asynchronous_order.csv").open() as file:
        return [{name: int(value) for name, value in line.items()} for line in csv.DictReader(file)]


def replay(
    folder: Path, ranks: list[dict[str, Any]], fences: int, samples: int
) -> dict[str, Tensor]:
    """The weights of one process that makes the recorded updates, with plain torch.

    The rate is the one of replica 0's step, or after a fence the one of all.

    Args:
        folder: of the run.
        ranks: what they have seen.
        fences: there is one after each so many batches.
        samples: of the data.
    """
    net, (x, y, _) = network(), data(samples).tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    versions, step = [{n: p.detach().clone() for n, p in net.named_parameters()}], 0
    counts = [0] * len(ranks)
    for version, pushes in groupby(order(folder), lambda push: push["version"]):
        assert version == len(versions) - 1
        optimizer.zero_grad()
        if len({*counts}) == 1 and counts[0] % fences == 0:
            step = counts[0]
        for push in pushes:
            counts[push["replica"]] += 1
            batch = ranks[push["replica"]]["seen"][push["push"]]
            read = {n: p.clone().requires_grad_() for n, p in versions[push["read"]].items()}
            out = torch.func.functional_call(net, read, (x[batch],))
            loss = nn.functional.cross_entropy(out, y[batch]) / len(ranks)
            for p, gradient in zip(net.parameters(), torch.autograd.grad(loss, [*read.values()])):
                p.grad = gradient if p.grad is None else p.grad + gradient
            if push["replica"] == 0:  # whose scheduler counts
                step = push["push"]
        optimizer.param_groups[0]["lr"] = 0.1 * rate(step)
        optimizer.step()
        versions.append({n: p.detach().clone() for n, p in net.named_parameters()})
    return {f"net.{name}": value for name, value in versions[-1].items()}


def assert_replayed(
    folder: Path, ranks: list[dict[str, Any]], bound: int, *, fences: int = 6, samples: int = 48
) -> list[int]:
    """All of it is true of the recorded order. Returns how old each push was."""
    pushes = order(folder)
    batches = [(r, number) for r, rank in enumerate(ranks) for number in range(len(rank["seen"]))]
    assert sorted((push["replica"], push["push"]) for push in pushes) == batches
    ages = [push["version"] - push["read"] for push in pushes]
    assert max(ages) <= bound
    expected = replay(folder, ranks, fences, samples)
    for rank in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=1e-9)
    return ages


@pytest.mark.parametrize("bound", [2, pytest.param(1, marks=slow), pytest.param(8, marks=slow)])
def test_weights_are_those_of_a_serial_replay_and_loggers_hear_how_old_pushes_were(
    tmp_path: Path, bound: int
) -> None:
    trained = training(tmp_path, bound, stall=0.05)
    ranks = trained.run()
    assert [rank["error"] for rank in ranks] == ["", ""]
    ages = assert_replayed(tmp_path, ranks, bound)
    assert max(ages) > 0
    logged: Counter[int] = Counter()
    with (tmp_path / "metrics.csv").open() as file:
        for line in csv.DictReader(file):
            for age in range(bound + 1):
                logged[age] += int(float(line.get(f"hybrid/pushes_of_staleness_{age}") or 0))
    assert logged == Counter(ages)
    assert trained.output.count(f"Asynchronous(staleness={bound}): replicas go on") == 1


@slow
def test_three_replicas_that_validate_and_save_between_batches_are_replayed(tmp_path: Path) -> None:
    trainer = {"val_check_interval": 2, "max_epochs": 3}
    ranks = train(tmp_path, 2, stall=0.05, replicas=3, trainer=trainer)
    assert_replayed(tmp_path, ranks, 2, fences=2)
    assert len(list(tmp_path.glob("checkpoints/*.ckpt"))) == 6
    validated = [rank["metrics"]["val_loss"] for rank in ranks]
    assert validated[0] == validated[1] == validated[2]


def test_a_bound_of_0_is_the_synchronous_run_bit_for_bit(tmp_path: Path) -> None:
    trainer = {"val_check_interval": 3}
    ranks = train(tmp_path / "asgd", 0, stall=0.01, trainer=trainer)
    expected = train(tmp_path / "allreduce", 0, arguments={}, trainer=trainer)
    assert [rank["error"] for rank in ranks + expected] == [""] * 4
    for rank, other in zip(ranks, expected):
        assert all(torch.equal(rank["weights"][n], other["weights"][n]) for n in other["weights"])
        assert rank["metrics"]["val_loss"] == other["metrics"]["val_loss"]


@slow
def test_checkpoints_are_those_of_the_synchronous_run_and_a_run_goes_on_from_one(
    tmp_path: Path,
) -> None:
    train(tmp_path / "allreduce", 0, arguments={})
    whole = train(tmp_path / "whole", 0)
    train(tmp_path / "first", 0, trainer={"max_epochs": 1})
    path = tmp_path / "first/checkpoints/step=6.ckpt"
    then = train(tmp_path / "then", 0, ckpt_path=str(path))
    assert [rank["error"] for rank in then] == ["", ""]
    for name, value in whole[0]["weights"].items():
        assert torch.equal(then[1]["weights"][name], value)
    saved = torch.load(path, weights_only=True)
    expected = torch.load(tmp_path / "allreduce/checkpoints/step=6.ckpt", weights_only=True)
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(saved[part], expected[part], rtol=0, atol=0)


@slow
def test_a_second_process_is_not_needed(tmp_path: Path) -> None:
    ranks = train(tmp_path / "asgd", 3, replicas=1)
    expected = train(tmp_path / "allreduce", 0, replicas=1, arguments={})
    assert all(torch.equal(ranks[0]["weights"][n], w) for n, w in expected[0]["weights"].items())


@slow
@pytest.mark.parametrize("replica", [0, 1])
def test_an_error_of_one_replica_ends_all(tmp_path: Path, replica: int) -> None:
    ranks = train(tmp_path, 2, fault=[replica, 3])
    assert all("this error is on purpose" in rank["error"] for rank in ranks)


ENDLESS = {"stall": 0.1, "trainer": {"max_epochs": 10_000}}


def signal_in_a_run(run: Training, rank: int, number: signal.Signals) -> int:
    """Send a signal to a rank that trains, and wait for the end of all. Returns the exit code."""
    process = run.start()
    pids = [run.folder / f"pid{each}" for each in range(2)]
    try:
        until = time.monotonic() + 120
        while not all(path.exists() and path.read_text() for path in pids):
            assert time.monotonic() < until, run.output
            time.sleep(0.1)
        numbers = [int(path.read_text()) for path in pids]
        os.kill(numbers[rank], number)
        code = process.wait(timeout=60)
        until = time.monotonic() + 20
        while any(Path(f"/proc/{pid}/exe").exists() for pid in numbers):
            assert time.monotonic() < until, run.output
            time.sleep(0.1)
        return code
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@slow
@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_that_is_killed_ends_all(tmp_path: Path, replica: int) -> None:
    run = training(tmp_path, 2, **ENDLESS)
    assert signal_in_a_run(run, replica, signal.SIGKILL) != 0
    assert "Lost " in run.output


@slow
def test_replicas_that_are_told_to_end_in_an_epoch_do_so_together(tmp_path: Path) -> None:
    run = training(tmp_path, 2, **ENDLESS, samples=80_000)
    assert signal_in_a_run(run, 0, signal.SIGTERM) == 0  # it tells the processes it has started
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert ["SIGTERMException" in rank["error"] for rank in ranks] == [True, True]
    assert_replayed(tmp_path, ranks, 2, fences=10_000, samples=80_000)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"optimizer": "Adam"}, "Adam"),
        pytest.param({"optimizer": "NAdam"}, "NAdam", marks=slow),
        pytest.param({"trainer": {"accumulate_grad_batches": 2}}, "accumulate", marks=slow),
        pytest.param({"trainer": {"gradient_clip_val": 1.0}}, "gradient_clip_val", marks=slow),
        pytest.param({"logs_together": True}, "on_step=True and sync_dist=True", marks=slow),
        pytest.param({"writes": True}, "changed by hand", marks=slow),
    ],
    ids=str,
)
def test_what_needs_the_replicas_together_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    ranks = train(tmp_path, 1, **config)
    assert all(named in rank["error"] for rank in ranks)
