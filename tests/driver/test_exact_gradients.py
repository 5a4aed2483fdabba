"""Exact schedules add up the gradients of one device, for all stages and micro-batches."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import Model, Replica, let_go
from test_running_orders import engines
from test_streamed_calls import Coming
from torch import Tensor, nn

from lightning_hybrid.comm.protocol import GiveFailure
from lightning_hybrid.driver.microbatches import Specialization
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.stage import backward_pass, forward_pass
from lightning_hybrid.stage.random_numbers import (
    generators_of_microbatch,
    microbatch_seed,
    seed_number_of,
)

CLOSE = {torch.float64: 1e-10, torch.float32: 1e-6}
slow = pytest.mark.conformance
SHAPES = [
    (2, torch.float64),
    (3, torch.float32),
    pytest.param(4, torch.float64, marks=slow),
    pytest.param(3, torch.float64, marks=slow),
    pytest.param(4, torch.float32, marks=slow),
]


class Block(nn.Module):
    """Batch statistics, a short cut, and random numbers."""

    captured_once = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second, self.drop = nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x + self.second(self.norm(self.first(x)).relu()))


def blocks(count: int, dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(*[Block() for _ in range(count)])).to(dtype)


def samples(count: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(count)
    return torch.randn(count, 4, dtype=dtype)


def devices_of(stages: int, rounds: int) -> tuple[int, ...]:
    return (*range(1, stages), 0) * rounds


class Windows(Coming):
    """Batches that are known up to the end of their window."""

    def __init__(self, windows: Sequence[Sequence[Tensor]]) -> None:
        super().__init__([batch for window in windows for batch in window], 1)
        self._windows = [number for number, window in enumerate(windows) for _ in window]

    def ahead(self, count: int) -> Any:
        if self.now is None or self._windows[self.now] not in self._windows[self.now + count :][:1]:
            return None
        return self.batches[self.now + count]


# of each number of stages: samples of a batch, numbers of micro-batches from S to 4 S; the last
# micro-batch is always smaller
SIZES = {2: (39, (2, 5, 8)), 3: (47, (3, 7, 12)), 4: (62, (4, 9, 16))}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Replica]]:
    """Makes replicas; their ranks, which are threads, draw one after the other."""
    alone, made = threading.Lock(), []

    @contextmanager
    def one_at_a_time(*arguments: Any) -> Iterator[None]:
        with alone, generators_of_microbatch(*arguments):
            yield

    for part in (forward_pass, backward_pass):
        monkeypatch.setattr(part, "generators_of_microbatch", one_at_a_time)

    def make(*arguments: Any, **options: Any) -> Replica:
        torch.manual_seed(3)
        made.append(Replica(*arguments, **options))
        return made[-1]

    yield make
    for replica in made:
        let_go(replica)


def gradients(replica: Replica) -> dict[str, Tensor]:
    """Those of all stages; forgotten afterwards."""
    replica.driver.commands.ask(GiveFailure())  # the workers have gone back
    found = {}
    for engine in engines(replica):
        for own in engine.owned:
            for name, parameter in own.specializations[0].named_parameters():
                found[name], parameter.grad = parameter.grad, None
    return found


def called(net: nn.Module, value: Tensor) -> None:
    """Call it with the generators of this process, which begin anew."""
    torch.manual_seed(3)
    net(value)


def one_device(net: nn.Module, parts: Sequence[Tensor], batch: int) -> Tensor:
    """The outputs for micro-batches, each with the generators that it has in a run."""
    outputs = []
    for number, part in enumerate(parts):
        seed = microbatch_seed(0, 0, seed_number_of(batch, 0), number)
        with generators_of_microbatch(seed, torch.device("cpu")):
            outputs.append(net(part))
    return torch.cat(outputs)


def gradients_of(net: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad()
    return found


def goes_back(replica: Replica, value: Tensor, step: int) -> Tensor:
    """Add the gradients of a batch."""
    replica.driver.begin_step(step)
    output = replica(value)
    replica.driver.gradients.before_backward()
    output.square().mean().backward()
    replica.driver.gradients.after_backward()
    return output.detach()


def assert_equal(found: Any, expected: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize(("stages", "dtype"), SHAPES, ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "looped", "zero_bubble"])
def test_gradients_and_statistics_are_those_of_one_device(
    cut: Callable[..., Replica], schedule: str, stages: int, dtype: torch.dtype
) -> None:
    """Dropout, batch statistics, a last micro-batch that is smaller, M = S .. 4 S."""
    rounds = 2 if schedule == "looped" else 1
    module, (count, numbers) = blocks(stages * rounds, dtype), SIZES[stages]
    reference, value = deepcopy(module.net), samples(count, dtype)
    split = range(1, stages) if schedule == "zero_bubble" else ()
    devices = devices_of(stages, rounds)
    replica = cut(module, value, devices, numbers[0], schedule=schedule, split=split)
    graph = replica.call.specialization.graph
    found = []
    for step, microbatches in enumerate(numbers):
        replica.call = NetworkCall(replica.network, Specialization(0, graph, microbatches))
        found.append((goes_back(replica, value, step), gradients(replica)))
    replica.end()
    called(reference, value)  # by the capture
    for step, (microbatches, (output, mine)) in enumerate(zip(numbers, found)):
        parts = value.chunk(microbatches)
        assert len(parts) == microbatches
        assert len(parts[-1]) < len(parts[0])
        expected = one_device(reference, parts, step)
        expected.square().mean().backward()
        assert_equal(output, expected.detach(), dtype)
        assert_equal(mine, gradients_of(reference), dtype)
    assert_equal(module.net.state_dict(), reference.state_dict(), dtype)


@pytest.mark.parametrize(("stages", "dtype"), SHAPES, ids=str)
def test_gradients_of_a_window_of_1f1b_are_those_of_one_device(
    cut: Callable[..., Replica], stages: int, dtype: torch.dtype
) -> None:
    """The same; its micro-batches are batches, each with a loss of its own."""
    module, (count, numbers) = blocks(stages, dtype), SIZES[stages]
    reference, value = deepcopy(module.net), samples(count, dtype)
    windows = [value.chunk(number) for number in numbers]
    coming = Windows(windows)
    first, found = windows[0][0], []
    replica = cut(module, first, devices_of(stages, 1), 1, schedule="1f1b_stream", batches=coming)
    last = 0
    for window in windows:
        begin, last = last, last + len(window)
        for step, batch in enumerate(window, begin):
            coming.now = step
            goes_back(replica, batch, step)
        coming.now = None
        found.append(gradients(replica))
    replica.end()
    called(reference, first)  # by the capture
    step = 0
    for window, mine in zip(windows, found):
        for batch in window:
            one_device(reference, [batch], step).square().mean().backward()
            step += 1
        assert_equal(mine, gradients_of(reference), dtype)
    assert_equal(module.net.state_dict(), reference.state_dict(), dtype)
