"""Drivers and workers on a device each: one device's numbers, and no rank waits for its device."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driven import Model, Replica, let_go, loss_of
from emulated_cuda import EVENTS, WAITS
from torch import Tensor, nn

from lightning_hybrid.comm.protocol import GiveFailure
from lightning_hybrid.stage import backward_pass, forward_pass
from lightning_hybrid.stage.random_numbers import (
    generators_of_microbatch,
    microbatch_seed,
    seed_number_of,
)

CPU = torch.device("cpu")
RANKS = {1: (0, 0), 2: (1, 0), 3: (1, 2, 0), 4: (1, 2, 3, 0)}
PLACEMENTS = [(1, 2, 1, 0), (0, 1, 0), (1, 0, 1, 0), (1, 2, 3, 1, 0)]
COPIES = [((1, 2), 0), (1, (2, 0), 0), ((1, 2), (3, 0), 0)]
PARTS, STEPS = 4, 4


class Block(nn.Module):
    """Batch statistics, a short cut, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second, self.drop = nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x + self.second(self.norm(self.first(x)).relu()))


class Host(nn.Module):
    """A tensor of the host and integers of two bytes are between the layers."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        order, counts = torch.arange(4), (x * 9).detach().to(torch.int16)
        for block in self.blocks:
            x = block(x) + order.to(x.device) + counts
        return x


class Window:
    """Batches that are known up to the end of the optimizer's step.

    Args:
        batches: of a training.
    """

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = [SimpleNamespace(tensors=[value]) for value in batches]
        self.now: int | None = None

    def ahead(self, count: int) -> Any:
        if self.now is None or self.now % PARTS + count >= PARTS:
            return None
        return self.batches[self.now + count]


def blocks(count: int) -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(*[Block() for _ in range(count)])).double()


def batches(streamed: bool) -> list[list[Tensor]]:
    """Those of each optimizer step: one, or as many as there are micro-batches else."""
    torch.manual_seed(1)
    count, size = (PARTS, 3) if streamed else (1, 4 * PARTS - 1)
    return [[*torch.randn(count, size, 4, dtype=torch.float64)] for _ in range(STEPS)]


def one_device(module: Model, streamed: bool) -> list[float]:
    """Train on the CPU, each micro-batch with the random numbers of a run. Returns the losses."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
    for step, window in enumerate(batches(streamed)):
        optimizer.zero_grad()
        for index, batch in enumerate(window):
            outputs, number = [], step * len(window) + index
            for place, part in enumerate([batch] if streamed else batch.chunk(PARTS)):
                seed = microbatch_seed(0, 0, seed_number_of(number, 0), place)
                with generators_of_microbatch(seed, CPU):
                    outputs.append(module.net(part))
            loss = loss_of(module, torch.cat(outputs))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def on_devices(
    replica: Replica, steps: Window, streamed: bool, events: Counter[tuple[str, str]]
) -> list[float]:
    """The same on all ranks; adds to ``events`` what is seen from the third step on."""
    optimizer, losses = torch.optim.SGD(replica.model.parameters(), lr=0.1, momentum=0.9), []
    replica.driver.optimizers.connect([optimizer])
    averages = [parameter.detach().clone() for parameter in replica.model.parameters()]
    count = len(steps.batches) // STEPS
    for step in range(STEPS):
        with EVENTS.during() as seen:
            optimizer.zero_grad()
            for number in range(step * count, (step + 1) * count):
                steps.now = number if streamed else None
                replica.driver.begin_step(number)
                loss = loss_of(replica.model, replica(*steps.batches[number].tensors))
                replica.driver.gradients.before_backward()
                loss.backward()
                replica.driver.gradients.after_backward()
                losses.append(loss.detach())
                with torch.no_grad():  # a moving average of the weights, and of the gradients
                    for average, parameter in zip(averages, replica.model.parameters()):
                        average.lerp_(parameter, 0.5)
                        average += parameter.grad
            steps.now = None
            optimizer.step()
            replica.driver.commands.ask(GiveFailure())  # the workers are done, too
        if step > 1:
            events.update(seen)
    replica.end()
    return [loss.item() for loss in losses]


Cut = Callable[..., Replica]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cut]:
    """Makes replicas of a device for each rank, which are threads: they draw in turn."""
    alone, made = threading.Lock(), []

    @contextmanager
    def one_at_a_time(*arguments: Any) -> Iterator[None]:
        with alone, generators_of_microbatch(*arguments):
            yield

    for part in (forward_pass, backward_pass):
        monkeypatch.setattr(part, "generators_of_microbatch", one_at_a_time)

    def make(*arguments: Any, **options: Any) -> Replica:
        torch.manual_seed(3)  # the capture calls the network
        made.append(Replica(*arguments, on=lambda rank: torch.device("cuda", rank), **options))
        return made[-1]

    yield make
    for replica in made:
        let_go(replica)


def assert_trains_as_the_cpu(
    cut: Cut,
    module: Model,
    devices: tuple[int | tuple[int, ...], ...],
    name: str,
    *,
    waits: bool = False,
) -> None:
    """Losses and weights of one CPU; in a steady step nobody waits for a device, or some do."""
    streamed = name == "1f1b_stream"
    reference, values = deepcopy(module), batches(streamed)
    steps = Window([batch.to("cuda:0") for each in values for batch in each])
    replica = cut(
        module,
        values[0][0].to("cuda:0"),
        devices,
        1 if streamed else PARTS,
        schedule=name,
        split=range(1, len(devices)) if name == "zero_bubble" else (),
        batches=steps if streamed else None,
    )
    seen: Counter[tuple[str, str]] = Counter()
    losses = on_devices(replica, steps, streamed, seen)
    with generators_of_microbatch(3, CPU):
        reference.net(values[0][0])  # as the capture has called it
    assert losses == pytest.approx(one_device(reference, streamed), abs=1e-10)
    found = module.state_dict()
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(found[key].cpu(), value, rtol=1e-10, atol=1e-10, msg=key)
    assert bool([event for event in seen if event[0] in WAITS]) is waits


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        *((name, ranks) for name in ("gpipe", "looped", "zero_bubble") for ranks in RANKS),
        *(
            ("1f1b_stream", ranks) for ranks in RANKS if ranks > 1
        ),  # a stream has a rank for each stage
    ],
)
def test_exact_schedules_train_as_one_cpu(cut: Cut, schedule: str, ranks: int) -> None:
    devices = RANKS[ranks] * (2 if schedule == "looped" and ranks > 1 else 1)
    assert_trains_as_the_cpu(cut, blocks(len(devices)), devices, schedule)


@pytest.mark.parametrize("devices", PLACEMENTS, ids=str)
def test_free_placements_train_as_one_cpu(cut: Cut, devices: tuple[int, ...]) -> None:
    assert_trains_as_the_cpu(cut, blocks(len(devices)), devices, "gpipe")


@pytest.mark.parametrize("shape", COPIES, ids=str)
def test_copies_of_stages_train_as_one_cpu(
    cut: Cut, shape: tuple[int | tuple[int, ...], ...]
) -> None:
    """The driver's of a last stage too, whose weights workers have."""
    assert_trains_as_the_cpu(cut, blocks(2), shape, "gpipe")


@pytest.mark.parametrize("ranks", [2, 3])
def test_tied_weights_train_as_one_cpu(cut: Cut, ranks: int) -> None:
    """Those of the first stage, in the last one, which is the driver's."""
    module = blocks(2 * ranks)
    module.net[-1].second.weight = module.net[0].second.weight
    assert_trains_as_the_cpu(cut, module, RANKS[ranks], "gpipe")


def test_what_two_workers_and_the_driver_share_trains_as_one_cpu(cut: Cut) -> None:
    """(What workers have of each other goes through the host.)"""
    module = blocks(6)
    for block in (module.net[2], module.net[-1]):
        block.first.weight = module.net[0].first.weight
    assert_trains_as_the_cpu(cut, module, RANKS[3], "gpipe", waits=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_that_nccl_does_not_carry_cross_a_cut(cut: Cut, ranks: int) -> None:
    torch.manual_seed(0)
    module = Model(Host(ranks)).double()
    assert_trains_as_the_cpu(cut, module, RANKS[ranks], "gpipe")
