"""Split backwards in real stages: the gradients of one device, in the order of the simulator."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Model, Replica, let_go
from planned import simulate
from torch import Tensor, nn

from lightning_hybrid.schedules.zero_bubble import zero_bubble
from lightning_hybrid.stage import backward_pass, forward_pass
from lightning_hybrid.stage.random_numbers import (
    generators_of_microbatch,
    microbatch_seed,
    seed_number_of,
)
from lightning_hybrid.stage.rank_stages import StageOptions

DEVICES = {2: (1, 0), 3: (1, 2, 0), 4: (1, 2, 3, 0)}
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-6}


class Block(nn.Module):
    """Batch statistics, a short cut, and random numbers."""

    captured_once = True

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second, self.drop = nn.Linear(4, 4), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x + self.second(self.norm(self.first(x)).relu()))


def blocks(dropout: float = 0.3) -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(*[Block(dropout) for _ in range(4)]))


def inputs(microbatches: int) -> Tensor:
    """A batch whose last micro-batch is smaller."""
    torch.manual_seed(1)
    return torch.randn(4 * microbatches - 1, 4)


Made = Callable[..., Replica]


@pytest.fixture
def split() -> Iterator[Made]:
    """Makes replicas, all of whose stages are split that may be."""
    made: list[Replica] = []

    def make(
        module: Model, value: Tensor, stages: int, parts: int, *which: int, **options: Any
    ) -> Replica:
        chosen = which or tuple(range(1, stages))
        more: Any = {"schedule": "zero_bubble", "split": chosen, "options": StageOptions(**options)}
        made.append(Replica(module, value, DEVICES[stages], parts, **more))
        return made[-1]

    yield make
    for replica in made:
        let_go(replica)


def train(replica: Replica, value: Tensor, times: int = 2) -> Tensor:
    """Accumulate the gradients of a batch. Returns the sum of its outputs."""
    for step in range(times):
        replica.driver.begin_step(step)
        output = replica(value)
        replica.driver.gradients.before_backward()
        output.square().mean().backward()
        replica.driver.gradients.after_backward()
    return output.detach()


def engines(replica: Replica) -> Any:
    """Of the stages, in their order."""
    workers = [replica.workers[rank]._networks[0].engine for rank in sorted(replica.workers)]
    return [*workers, replica.network.engine]


def gradients(replica: Replica) -> dict[str, Tensor | None]:
    """After the end of a run."""
    return {name: parameter.grad for name, parameter in replica.model.net.named_parameters()}


def one_device(module: Model, value: Tensor, microbatches: int, times: int = 2) -> Tensor:
    for step in range(times):
        outputs = []
        for number, part in enumerate(value.chunk(microbatches)):
            seed = microbatch_seed(0, 0, seed_number_of(step, 0), number)
            with generators_of_microbatch(seed, torch.device("cpu")):
                outputs.append(module.net(part))
        output = torch.cat(outputs)
        output.square().mean().backward()
    return output.detach()


@pytest.mark.parametrize("dtype", CLOSE)
def test_gradients_are_those_of_one_device(
    split: Made, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, batch statistics, and a last micro-batch that is smaller."""
    alone = threading.Lock()  # these ranks are threads, which share the generators of a process

    @contextmanager
    def one_at_a_time(*arguments: Any) -> Iterator[None]:
        with alone, generators_of_microbatch(*arguments):
            yield

    for part in (forward_pass, backward_pass):
        monkeypatch.setattr(part, "generators_of_microbatch", one_at_a_time)
    module, value = blocks().to(dtype), inputs(5).to(dtype)
    reference = deepcopy(module)
    replica = split(module, value, 3, 5)
    output = train(replica, value)
    replica.end()
    reference.net(value)  # the capture has called it, too
    expected = one_device(reference, value, 5)
    torch.testing.assert_close(output, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    found = gradients(replica)
    for name, parameter in reference.net.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, rtol=CLOSE[dtype], atol=CLOSE[dtype]
        )


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 5)])
def test_the_trace_of_a_run_has_the_order_of_the_simulator(
    split: Made, stages: int, microbatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_HYBRID_TRACE", str(tmp_path))
    value = inputs(microbatches)
    replica = split(blocks(), value, stages, microbatches)
    train(replica, value, times=1)
    replica.end()
    ones = [1.0] * stages
    timeline = simulate(zero_bubble(stages, microbatches), ones, ones, weight_s=ones)
    expected = [
        [
            f"{event.instruction.kind} {event.instruction.microbatch}"
            for event in sorted(timeline.events, key=lambda event: event.start_s)
            if event.stage == stage and event.instruction.kind.computes
        ]
        for stage in range(stages)
    ]
    ran = [
        [event["name"] for event in rank.trace._events if event["tid"] == "compute"]
        for rank in engines(replica)
    ]
    assert ran == expected


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def whole_backwards(replica: Replica, value: Tensor) -> int:
    """How many weight parts there were to put off."""
    count = []
    for rank in engines(replica):
        span = rank.trace.span

        def counted(name: str, span: Any = span) -> Any:
            count.extend([name] * name.startswith("weight "))
            return span(name)

        rank.trace.span, rank.trace.on = counted, True
    train(replica, value)
    replica.end()
    return len(count)


class Recurrent(nn.Module):
    """One weight twice on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.cell(x).tanh())


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(self.layer(x))


@pytest.mark.parametrize("layer", [Recurrent, Doubled])
def test_a_stage_that_cannot_be_split_goes_back_at_once_and_is_exact(
    split: Made, layer: type[nn.Module]
) -> None:
    torch.manual_seed(0)
    module = Model(nn.Sequential(*[layer() for _ in range(2)])).double()
    value, reference = inputs(3).double(), deepcopy(module)
    replica = split(module, value, 2, 3)
    with pytest.warns(UserWarning, match="Stage 1 goes back in one .* autograd.Function, a weight"):
        assert whole_backwards(replica, value) == 0
    one_device(reference, value, 3)
    found = gradients(replica)
    for name, parameter in reference.net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-10)


def test_hooks_on_parameters_hear_of_each_micro_batch_once(split: Made) -> None:
    module, value = blocks(dropout=0.0).double(), inputs(3).double()
    replica = split(module, value, 2, 3)
    mine = replica.network.engine.owned[0].specializations[0]
    heard: list[None] = []
    for parameter in mine.parameters():
        parameter.register_hook(lambda _: heard.append(None))
    train(replica, value, times=1)
    assert len(heard) == 3 * len([*mine.parameters()])


def test_only_the_stages_that_are_named_put_weights_off(split: Made) -> None:
    value = inputs(4)
    assert whole_backwards(split(blocks(), value, 3, 4, 2), value) == 2 * 4
