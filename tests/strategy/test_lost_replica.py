"""Replicas that go on without a lost one train as one device with the samples that are left."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from balance_script import data, network
from conftest import Training
from test_balance import assert_close, whole_batches
from torch import Tensor, nn

from lightning_hybrid.planning import deal

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.conformance
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
    stages = config["stages"]
    speeds = [min(each) for each in zip(*[iter(config["speeds"])] * stages)]
    batches = []
    for step, (_, batch) in enumerate(whole_batches(config, 2)):
        had = [replica for replica in range(len(speeds)) if lost.get(replica, step) >= step]
        ends = list(accumulate(deal(len(batch), [speeds[r] for r in had]), initial=0))
        parts = {r: batch[ends[place] : ends[place + 1]] for place, r in enumerate(had)}
        # the share of a lost replica is missing in the step in which it was lost, and in no other
        batches.append([n for r, part in parts.items() if lost.get(r) != step for n in part])
    seen = seen_together(folder, {replica * stages: step for replica, step in lost.items()})
    assert [numbers for numbers, _ in seen] == batches
    losses, weights = one_device(batches, config["samples"])
    means = [sum(each) / len(each) for each in losses]
    assert [loss for _, loss in seen] == pytest.approx(means, rel=0, abs=1e-10)
    left = [torch.load(path, weights_only=False) for path in folder.glob("rank*.pt")]
    assert len(left) == (len(speeds) - len(lost)) * stages
    for rank in left:
        assert_close(rank["weights"], weights)


@pytest.mark.parametrize(
    ("config", "kill", "replica", "step"),
    [
        (THREE, {"rank": 1, "step": 2, "where": "on_train_batch_start"}, 1, 2),
        (THREE, {"rank": 2, "step": 2, "where": "on_after_backward"}, 2, 3),
        (THREE, {"rank": 2, "step": 2, "where": "on_before_backward"}, 2, 2),
        (THREE, {"rank": 1, "step": 5, "where": "on_train_batch_start"}, 1, 5),
        (STAGES, {"rank": 2, "step": 2, "where": "on_before_backward"}, 1, 2),
        (STAGES, {"rank": 3, "by": 2, "step": 2, "where": "on_before_backward"}, 1, 2),
    ],
)
def test_the_others_train_on_with_the_numbers_of_one_device(
    tmp_path: Path, config: dict[str, Any], kill: dict[str, Any], replica: int, step: int
) -> None:
    config = {**config, "kills": [{"by": kill["rank"], **kill}]}
    training = train(tmp_path, **config)
    assert_goes_on(tmp_path, config, {replica: step})
    assert training.output.count(f"replica {replica} is lost") == 1
