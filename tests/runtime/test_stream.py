"""Streamed schedules train as their formulas say: real stages, compared with serial models."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from conftest import let_go
from driven import Model, Replica, loss_of
from serial_schedules import in_stages, train_serially
from torch import Tensor, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.pipeline.stages import StageOptions
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.schedules.orders import Part

STEPS = 30
DEVICES = {2: (1, 0), 3: (1, 2, 0), 4: (1, 2, 3, 0)}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


@dataclass(eq=False)
class One:
    """A batch of one tensor."""

    tensors: Sequence[Tensor]


class Coming:
    """Batches that are all known, between two barriers."""

    def __init__(self, values: Sequence[Tensor], epoch: int) -> None:
        self.batches, self.epoch = [One([value]) for value in values], epoch
        self.now: int | None = None

    def ahead(self, count: int) -> One | None:
        if self.now is None:
            return None
        number = self.now + count
        within = number // self.epoch == self.now // self.epoch
        return self.batches[number] if within and number < len(self.batches) else None


def model() -> Model:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.Tanh())]
    return Model(nn.Sequential(*layers)).double()


def values(count: int = STEPS, size: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(count, size, 3, dtype=torch.float64))


Streamed = Callable[..., tuple[Replica, Coming]]


@pytest.fixture
def streamed() -> Iterator[Streamed]:
    """Makes replicas under a streamed schedule."""
    made: list[Replica] = []

    def make(
        module: Model, schedule: str, stages: int, inputs: Sequence[Tensor], epoch: int = STEPS,
        **options: Any,
    ) -> tuple[Replica, Coming]:
        coming = Coming(inputs, epoch)
        made.append(
            Replica(
                module, inputs[0], DEVICES[stages], parts=1, schedule=schedule, batches=coming,
                options=StageOptions(**options),
            )
        )
        return made[-1], coming

    yield make
    for replica in made:
        let_go(replica)


def train(
    replica: Replica,
    coming: Coming,
    optimizer: torch.optim.Optimizer,
    *,
    window: int = 1,
    after: Callable[[int], object] = lambda _: None,
) -> None:
    driver = replica.driver
    driver.optimizers.connect([optimizer])
    for number, batch in enumerate(coming.batches):
        coming.now = number
        driver.begin_step(number)
        driver.gradients.synchronize = (number + 1) % window == 0
        loss = loss_of(replica.model, replica(batch.tensors[0]))
        coming.now = None
        if number % window == 0:
            optimizer.zero_grad()
        driver.gradients.before_backward()
        loss.backward()
        driver.gradients.after_backward()
        if (number + 1) % window == 0:
            optimizer.step()
        after(number)
    driver.interrupt()


def square_gradient(output: Tensor) -> Tensor:
    return 2 * output / output.numel()


def compare(found: Model, expected: Model) -> None:
    for name, value in expected.net.state_dict().items():
        torch.testing.assert_close(found.net.state_dict()[name], value, rtol=0, atol=1e-9)


def frozen_scale(module: Model) -> Model:
    module.scale.requires_grad_(False)  # the serial models know the network alone
    return module


@pytest.mark.parametrize("stages", DEVICES)
@pytest.mark.parametrize("weights", ["stash", "recompute", "current"])
@pytest.mark.parametrize("name", ["pipedream", "ddg", "fdg", "akintoye"])
def test_a_delayed_schedule_trains_as_its_serial_model(
    streamed: Streamed, name: str, weights: Any, stages: int
) -> None:
    kinds = {"plain": partial(torch.optim.SGD, lr=0.05)} if name == "akintoye" else OPTIMIZERS
    for make in kinds.values():
        module, reference = frozen_scale(model()), model()
        train_serially(
            in_stages(reference.net, stages),
            make(reference.net.parameters()),
            values(),
            square_gradient,
            STREAMED[name].look_aheads(stages),
            weights,
        )
        replica, coming = streamed(module, name, stages, values(), delayed_weights=weights)
        train(replica, coming, make(module.parameters()))
        replica.end()
        compare(module, reference)
