"""Replicas that take unequal parts of each batch train as one device that has the whole batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from balance_script import data, network
from conftest import Training
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from lightning_hybrid import BySpeed

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.conformance
SCRIPT = Path(__file__).with_name("balance_script.py")
USUAL = {"replicas": 2, "stages": 1, "speeds": [1.0, 0.43], "samples": 29, "batch": 4}


def train(folder: Path, **config: Any) -> list[dict[str, Any]]:
    """What each driver has seen."""
    return Training(folder, script=SCRIPT, **{**USUAL, "trainer": {}, **config}).run()


def whole_batches(config: dict[str, Any], epochs: int) -> Iterator[tuple[int, list[int]]]:
    """The global batches, told from torch's sampler and the sizes alone."""
    order = DistributedSampler(data(config["samples"]), 1, 0, seed=5)
    size, replicas = config["batch"] * config["replicas"], config["replicas"]
    for epoch in range(epochs):
        order.set_epoch(epoch)
        left = list(order)
        while left:
            # what would be too little for a sample per replica takes from the batch before
            taken = (
                size if len(left) - size >= replicas or len(left) <= size else len(left) - replicas
            )
            taken = min(taken, len(left), size)
            yield epoch, left[:taken]
            left = left[taken:]


def one_device(config: dict[str, Any], epochs: int = 2, window: int = 1) -> dict[str, Tensor]:
    """The weights of one process that has the whole batches, with plain torch."""
    net, scale = (
        network(config.get("norm", False)),
        nn.Parameter(torch.ones((), dtype=torch.float64)),
    )
    optimizer = torch.optim.SGD([scale, *net.parameters()], lr=0.1, momentum=0.9)
    x, y, _ = data(config["samples"]).tensors
    batches = list(whole_batches(config, epochs))
    for number, (epoch, batch) in enumerate(batches):
        in_epoch = number - next(i for i, (e, _) in enumerate(batches) if e == epoch)
        last = number + 1 == len(batches) or batches[number + 1][0] != epoch
        losses = nn.functional.cross_entropy(scale * net(x[batch]), y[batch], reduction="none")
        weights = 1.0 + torch.tensor(batch) % 3 if config.get("weighed") else torch.ones(len(batch))
        ((losses * weights).sum() / weights.sum() / window).backward()
        if (in_epoch + 1) % window == 0 or last:
            optimizer.step()
            optimizer.zero_grad()
    return {"scale": scale, **{f"net.{name}": value for name, value in net.state_dict().items()}}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-10, msg=name)


def assert_each_sample_once(
    ranks: list[dict[str, Any]], config: dict[str, Any], epochs: int
) -> None:
    """In the batches of one device, each replica in its place."""
    steps = list(zip(*(rank["seen"] for rank in ranks), strict=True))
    found = [(parts[0][0], [n for _, numbers, _ in parts for n in numbers]) for parts in steps]
    assert found == list(whole_batches(config, epochs))


@pytest.mark.parametrize(
    "config",
    [
        {},
        # the last batch: 2 samples
        pytest.param({"replicas": 3, "speeds": [1.0, 0.43, 0.16], "samples": 26}, marks=slow),
        pytest.param({"manual": True}, marks=slow),
        pytest.param({"apart": True}, marks=slow),
        pytest.param(
            {"stages": 2, "speeds": [1.0, 0.5, 0.4, 0.2], "arguments": {"num_microbatches": 2}},
            marks=slow,
        ),
        pytest.param({"stages": 2, "speeds": [1.0, 0.5, 0.4, 0.2], "manual": True}, marks=slow),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device_with_the_whole_batch(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    config = {**USUAL, **config}
    drivers = train(tmp_path, **config)
    assert [driver["error"] for driver in drivers] == [""] * config["replicas"]
    expected = one_device(config)
    for driver in drivers:
        assert_close(driver["weights"], expected)
    assert_each_sample_once(drivers, config, epochs=2)
    # the mean over the epoch counts each sample once, as Lightning weighs by the size of a batch
    seen = [entry for driver in drivers for entry in driver["seen"] if entry[0] == 1]
    mean = sum(len(n) * loss for _, n, loss in seen) / sum(len(n) for _, n, _ in seen)
    assert drivers[0]["logged"] == pytest.approx(mean, rel=1e-6)


@slow
def test_unequal_batches_of_a_window_of_accumulation_have_each_its_weight(tmp_path: Path) -> None:
    config = {**USUAL, "trainer": {"accumulate_grad_batches": 2}}
    expected = one_device(config, window=2)
    for rank in train(tmp_path, **config):
        assert_close(rank["weights"], expected)


@slow
def test_batch_statistics_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    config = {**USUAL, "norm": True, "trainer": {"sync_batchnorm": True}}
    expected = one_device(config)
    for rank in train(tmp_path, **config):
        assert_close(rank["weights"], expected)


@slow
def test_a_module_says_what_its_batches_weigh(tmp_path: Path) -> None:
    config = {**USUAL, "weighed": True}
    expected = one_device(config)
    for rank in train(tmp_path, **config):
        assert_close(rank["weights"], expected)


@pytest.mark.parametrize(
    "config",
    [
        {"speeds": [1.0, 0.43]},
        {"speeds": [0.3, 1.0]},  # others than before the restart
        {"replicas": 3, "speeds": [1.0, 0.43, 0.16], "samples": 26},
        {"apart": True},
    ],
    ids=str,
)
@slow
@pytest.mark.parametrize("step", [2, 6, 4])
def test_a_run_that_goes_on_in_an_epoch_sees_the_samples_that_are_left(
    tmp_path: Path, config: dict[str, Any], step: int
) -> None:
    config = {**USUAL, **config}
    speeds = [1.0, 0.43, 0.16][: config["replicas"]]
    train(tmp_path / "first", **{**config, "speeds": speeds, "trainer": {"max_steps": step}})
    path = str(tmp_path / f"first/checkpoints/step={step}.ckpt")
    ranks = train(tmp_path / "then", ckpt_path=path, **config)
    steps = list(zip(*(rank["seen"] for rank in ranks), strict=True))
    found = [(parts[0][0], [n for _, numbers, _ in parts for n in numbers]) for parts in steps]
    assert found == list(whole_batches(config, 2))[step:]
    for rank in ranks:
        assert_close(rank["weights"], one_device(config))


def test_batches_that_replicas_deal_themselves_are_weighted_by_their_samples(
    tmp_path: Path,
) -> None:
    ranks = train(tmp_path, own_samples=True, samples=25, trainer={"max_epochs": 1})
    net, scale = network(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([scale, *net.parameters()], lr=0.1, momentum=0.9)
    x, y, _ = data(25).tensors
    for step in range(5):
        batch = [*range(3 * step, 3 * step + 3), *range(15 + 2 * step, 17 + 2 * step)]
        nn.functional.cross_entropy(scale * net(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {"scale": scale, **{f"net.{name}": v for name, v in net.state_dict().items()}}
    for rank in ranks:
        assert_close(rank["weights"], expected)


def test_each_epoch_is_dealt_by_what_was_measured_in_the_one_before(tmp_path: Path) -> None:
    config = {**USUAL, "speeds": [1.0, 1.0], "sleeps": [0.01, 0.05], "samples": 80}
    ranks = train(tmp_path, **config, dealt=BySpeed(replan="epoch"))
    assert_each_sample_once(ranks, config, epochs=2)
    expected = one_device(config)
    for rank in ranks:
        assert_close(rank["weights"], expected)
    first, second = ([len(n) for e, n, _ in ranks[0]["seen"] if e == epoch] for epoch in (0, 1))
    assert set(first) == {4}
    assert min(second) > 4  # and replica 1 has fewer
    said = (tmp_path / "output.txt").read_text()
    assert said.count("replan='epoch': from the next epoch on the replicas take") == 1
