"""Replicas that go on without a lost one train as one device with the samples that are left."""

import json
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from balance_script import data, network
from conftest import Training
from test_balance import assert_close, whole_batches
from torch import Tensor, nn

from lightning_hybrid.planning import share_samples

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.conformance,
    pytest.mark.filterwarnings("ignore"),
]
SCRIPT = Path(__file__).with_name("lost_replica_script.py")
THREE = {"replicas": 3, "stages": 1, "speeds": [1.0, 0.43, 0.3], "samples": 60, "batch": 4}
STAGES = {"replicas": 2, "stages": 2, "speeds": [1.0] * 4, "samples": 40, "batch": 4}


def train(folder: Path, **config: Any) -> Training:
    """Train to the end, which rank 0 must reach without an error."""
    training = Training(folder, script=SCRIPT, **{**config, "trainer": config.get("trainer", {})})
    process = training.start()
    assert process.wait(timeout=120) == 0, training.output
    return training


def seen_together(folder: Path, lost: dict[int, int]) -> list[tuple[list[int], float]]:
    """Of each step the samples of all replicas, and the mean of their losses.

    Args:
        folder: of the script.
        lost: by rank of the driver, the step in which it was lost, which it does not count in.
    """
    steps: dict[int, list[tuple[list[int], float]]] = {}
    for rank in sorted(int(path.suffix[1:]) for path in folder.glob("seen.*")):
        for line in (folder / f"seen.{rank}").read_text().splitlines():
            step, numbers, loss = json.loads(line)
            if step < lost.get(rank, step + 1):
                steps.setdefault(step, []).append((numbers, loss))
    assert list(steps) == list(range(len(steps)))
    together = []
    for parts in steps.values():
        numbers = [number for mine, _ in parts for number in mine]
        together.append((numbers, sum(len(mine) * loss for mine, loss in parts) / len(numbers)))
    return together


def one_device(
    batches: list[list[int]], samples: int
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Of each step the losses of its samples, and the weights in the end, with plain torch."""
    net, scale = network(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([scale, *net.parameters()], lr=0.1, momentum=0.9)
    x, y, _ = data(samples).tensors
    seen = []
    for batch in batches:
        losses = nn.functional.cross_entropy(scale * net(x[batch]), y[batch], reduction="none")
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(losses.tolist())
    return seen, {"scale": scale, **{f"net.{n}": value for n, value in net.state_dict().items()}}


def assert_goes_on(folder: Path, config: dict[str, Any], lost: dict[int, int]) -> None:
    """The replicas that are left have trained as one device with the samples that are left.

    Args:
        folder: of the script.
        config: of the script.
        lost: by replica, the step in which it was lost.
    """
    ahead = 2 if config.get("apart") else 0  # what a process of a loader has been asked for
    stages = config["stages"]
    speeds = [min(each) for each in zip(*[iter(config["speeds"])] * stages)]
    whole, batches = list(whole_batches(config, 2)), []
    for step, (epoch, batch) in enumerate(whole):
        # the share of a lost replica is missing in the step in which it was lost, and in those that
        # were dealt by then
        late = {r for r, at in lost.items() if at <= step <= at + ahead and whole[at][0] == epoch}
        had = [r for r in range(len(speeds)) if lost.get(r, step) >= step or r in late]
        ends = list(accumulate(share_samples(len(batch), [speeds[r] for r in had]), initial=0))
        parts = {r: batch[ends[place] : ends[place + 1]] for place, r in enumerate(had)}
        batches.append([n for r, part in parts.items() if r not in late for n in part])
    seen = seen_together(folder, {replica * stages: step for replica, step in lost.items()})
    assert [numbers for numbers, _ in seen] == batches
    losses, weights = one_device(batches, config["samples"])
    means = [sum(each) / len(each) for each in losses]
    assert [loss for _, loss in seen] == pytest.approx(means, rel=0, abs=1e-10)
    left = [torch.load(path, weights_only=False) for path in folder.glob("rank*.pt")]
    assert len(left) == len(speeds) - len(lost)
    for rank in left:
        assert_close(rank["weights"], weights)


def kill(rank: int | None, step: int, where: str, by: int | None = None) -> dict[str, Any]:
    return {"rank": rank, "step": step, "where": where, "by": rank if by is None else by}


@pytest.mark.parametrize(
    ("config", "killed", "lost"),
    [
        (THREE, [kill(1, 2, "on_train_batch_start")], {1: 2}),
        (THREE, [kill(2, 2, "on_before_backward")], {2: 2}),
        (THREE, [kill(2, 2, "on_after_backward")], {2: 3}),  # when all have its part
        (THREE, [kill(1, 2, "on_before_backward"), kill(2, 6, "on_before_backward")], {1: 2, 2: 6}),
        ({**THREE, "apart": True}, [kill(1, 1, "on_before_backward")], {1: 1}),
        (STAGES, [kill(2, 2, "on_before_backward")], {1: 2}),
        (STAGES, [kill(3, 2, "on_before_backward", by=2)], {1: 2}),  # a worker
    ],
)
def test_when_a_replica_is_lost_the_others_train_on_with_the_numbers_of_one_device(
    tmp_path: Path, config: dict[str, Any], killed: list[dict[str, Any]], lost: dict[int, int]
) -> None:
    config = {**config, "kills": killed}
    training = train(tmp_path, **config)
    assert_goes_on(tmp_path, config, lost)
    for replica in lost:
        assert training.output.count(f"replica {replica} is lost") == 1
    assert_all_is_validated_and_saved(tmp_path, config, max(lost.values()))


def assert_all_is_validated_and_saved(folder: Path, config: dict[str, Any], since: int) -> None:
    """By those that are left, from a step on."""
    drivers = [torch.load(path, weights_only=False) for path in sorted(folder.glob("rank*.pt"))]
    assert [rank["world"] for rank in drivers] == [(n, len(drivers)) for n in range(len(drivers))]
    samples: dict[int, set[int]] = {}
    for rank in drivers:
        for step, numbers in rank["validated"]:
            samples.setdefault(step, set()).update(numbers)
    assert len(samples) == 2
    assert all(numbers == set(range(12)) for step, numbers in samples.items() if step > since)
    saved = torch.load(folder / "checkpoints/epoch=1.ckpt", weights_only=True)
    assert_close(saved["state_dict"], drivers[0]["weights"])
    momenta = saved["optimizer_states"][0]["state"]
    assert len(momenta) == len(drivers[0]["weights"])


@pytest.mark.parametrize(
    ("killed", "words"),
    [
        (kill(0, 2, "on_before_backward"), "Lost rank 0"),
        (kill(1, 5, "on_validation_start"), "Lost a rank"),
        (kill(None, 2, "on_before_backward", by=1), "ValueError: this error is on purpose"),
    ],
)
def test_all_replicas_end_where_more_than_the_average_of_a_step_is_missing(
    tmp_path: Path, killed: dict[str, Any], words: str
) -> None:
    training = Training(tmp_path, script=SCRIPT, **{**THREE, "trainer": {}, "kills": [killed]})
    process = training.start()
    assert process.wait(timeout=120)
    pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in range(3)]
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):  # others than rank 0
        assert time.monotonic() < deadline, training.output
        time.sleep(0.1)
    assert words in training.output
    assert "is lost. From now on" not in training.output


def test_processes_that_torchrun_has_started_and_ends_together_are_refused(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    config = {**THREE, "trainer": {}, "kills": []}
    training = Training(tmp_path, script=SCRIPT, launcher=torchrun, **config)
    assert training.start().wait(timeout=120)
    assert "'continue' needs processes that the script has started itself" in training.output
