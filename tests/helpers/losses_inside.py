"""A replica whose network returns its loss, so that backwards may run inside of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from driven import Model, Ranks
from torch import Tensor, nn

from lightning_hybrid._torch.autograd import backwards_as_ever
from lightning_hybrid.capture import Capture
from lightning_hybrid.capture.watched_calls import own_forward
from lightning_hybrid.comm.protocol import GiveFailure, Placement
from lightning_hybrid.driver.inside_call import why_not_inside
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.graph import NetworkGraph, cut, network_partitions
from lightning_hybrid.remote.hollow_network import Hollow
from lightning_hybrid.stage.rank_stages import borrowed_parameters

CPU = torch.device("cpu")
ROWS, STEPS, WIDTH, CLASSES = 8, 3, 6, 5


class Net(nn.Module):
    """Six linear layers and a loss over valid targets.

    Args:
        between: makes what stands behind each hidden layer.
    """

    def __init__(self, between: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        torch.manual_seed(3)
        hidden = [part for _ in range(5) for part in (nn.Linear(WIDTH, WIDTH), between())]
        self.layers = nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class Tied(Net):
    """The weight of one layer is also that of a later one, in another stage.

    Args:
        one: the number of the earlier layer.
        other: that of the later one.
    """

    def __init__(self, one: int, other: int) -> None:
        super().__init__()
        first, last = self.layers[2 * one], self.layers[2 * other]
        last.weight = first.weight


def batch(number: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, STEPS, WIDTH, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (ROWS, STEPS), generator=generator)
    y[torch.rand(ROWS, STEPS, generator=generator) < 0.4] = -100
    y[:2] = -100
    return x, y


class Cut(Ranks):
    """A replica whose network has two inputs, and a loss inside.

    Args:
        net: the network.
        stages: number of ranks.
        schedule: the name of the schedule.
        parts: number of micro-batches.
        on: the device of each rank.
        rounds: stages of each rank.
        split: numbers of the stages whose backward is split.

    Attributes:
        alive: by rank, in the order of its first stage, of how many forwards its stages have kept
            something at once.
        lines: said to the user.
    """

    def __init__(
        self,
        net: nn.Module,
        stages: int,
        schedule: str,
        parts: int = 4,
        on: Callable[[int], torch.device] = lambda _: CPU,
        *,
        rounds: int = 1,
        split: Sequence[int] = (),
    ) -> None:
        super().__init__(Model(deepcopy(net)).double(), stages - 1, on=on)
        self._devices, self._parts = (*range(1, stages), 0) * rounds, parts
        self._split = split
        self._schedule, self._calls = schedule, dict[NetworkGraph, NetworkCall]()
        inner = self.model.net
        self._hollow = Hollow(inner, on(0))
        shares = schedule == "1f1b"
        self._capture = Capture(inner, own_forward(inner), self._run, shares=shares)
        self.alive = [0] * stages
        self.steps, self.lines = 0, list[str]()

    def __call__(self, x: Tensor, y: Tensor) -> Any:
        with self.driver.remote.suspended(), backwards_as_ever(), self._hollow:
            return self._capture((x, y), {})

    def _run(self, graph: NetworkGraph, values: Sequence[Any], loss: Any = None) -> list[Any]:
        with self._hollow.lifted():
            if graph not in self._calls:
                self._calls[graph] = self._cut(graph)
            return self._calls[graph](values, loss)

    def _cut(self, graph: NetworkGraph) -> NetworkCall:
        partitions, stages = network_partitions(graph), len(self._devices)
        bounds = [round(len(partitions) / stages * k) for k in range(1, stages)]
        codes = cut(graph, partitions, bounds, self.driver.device)
        if self._calls:
            self.driver.distribution.distribute_again(self.network, codes)
        else:
            placement = Placement.of(codes, self._devices, self._schedule, self._split)
            self.network = self.driver.add_network(
                "net", self.model.net, codes, placement, continues_generators=False
            )
            self.why_not = why_not_inside(self.network, graph)
            for stage, engine in enumerate(self.engines()):
                self._count(stage, engine)
        specialization = self.network.specialize(graph, self._parts)
        return NetworkCall(self.network, specialization, self.lines.append)

    def engines(self) -> list[Any]:
        """Of the stages, in their order."""
        workers = [self.workers[rank]._networks[0].engine for rank in sorted(self.workers)]
        return [*workers, self.network.engine]

    def _count(self, stage: int, engine: Any) -> None:
        stage_for = engine.stage_for

        def counted(own: Any, key: Any) -> Any:
            calls = self.networks()[stage].calls.values()
            now = max((sum(map(len, call.saved)) + 1 for call in calls), default=0)
            self.alive[stage] = max(self.alive[stage], now)
            return stage_for(own, key)

        engine.stage_for = counted

    def networks(self) -> list[Any]:
        return [*(self.workers[r]._networks[0] for r in sorted(self.workers)), self.network]

    def begin(self) -> None:
        self.driver.begin_step(self.steps)
        self.steps += 1

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.driver.gradients.before_backward()
        loss.backward(**options)
        self.driver.gradients.after_backward()

    def gradients(self) -> dict[str, Tensor | None]:
        """Of all parameters, those that their owners have."""
        self.driver.commands.ask(GiveFailure())
        return {n: p.grad for n, p in self._owned(lambda net: net.named_parameters())}

    def buffers(self) -> dict[str, Tensor]:
        self.driver.commands.ask(GiveFailure())
        return dict(self._owned(lambda net: net.named_buffers()))

    def _owned(self, named: Callable[[nn.Module], Any]) -> Iterator[tuple[str, Any]]:
        placement = self.network.placement
        borrowed = borrowed_parameters(self.network.module, placement)
        for rank, names in zip(self._devices, placement.owned):
            net = self.model.net if rank == 0 else self.modules[rank].net
            mine = names - borrowed[rank]
            yield from ((n, value) for n, value in named(net) if n in mine)

    def clear(self) -> None:
        for rank in self._devices:
            net = self.model.net if rank == 0 else self.modules[rank].net
            for parameter in net.parameters():
                parameter.grad = None


def compare(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-12) -> None:
    assert one.keys() == other.keys()
    assert any(value is not None for value in one.values())
    for name, value in one.items():
        expected = other[name]
        assert (value is None) == (expected is None), name
        if value is not None and tolerance:
            torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
        elif value is not None:
            assert torch.equal(value, expected), name


def whole(net: nn.Module, *batches: tuple[Tensor, Tensor], factor: float = 1.0) -> dict[str, Any]:
    """The gradients of one device."""
    alone = deepcopy(net).double()
    for x, y in batches:
        (alone(x, y)["loss"] * factor).backward()
    return {name: p.grad for name, p in alone.named_parameters()}
