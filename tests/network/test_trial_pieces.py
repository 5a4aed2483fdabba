"""A network whose weights have no memory yet, or are on other ranks, is tried like any other."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from capturing import Staged, captured
from deferring import build
from torch import Tensor, nn

from lightning_hybrid.network import NetworkGraph
from lightning_hybrid.network.batch_splitting import why_whole
from lightning_hybrid.network.trial_pieces import Pieces
from lightning_hybrid.tensors import is_deferred, offload

CPU = torch.device("cpu")
Between = Callable[[Tensor, Tensor], Tensor]


class Three(nn.Module):
    """Three linear layers, dropout, and something between the second and the third."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.gate = nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.ones(4))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.a(x)))
        h = nn.functional.dropout(self.b(h), 0.5, self.training)
        return self.c(self.between(h, self.gate) * self.scale)


def in_the_backward(h: Tensor, _: Tensor) -> Tensor:
    mean = h.mean(0)
    return h + (mean - mean.detach())


def straight_through(h: Tensor, _: Tensor) -> Tensor:
    return h + (h.round() - h).detach()


SEPARATE: list[Between] = [lambda h, _: h.tanh(), straight_through]
MEETING: list[Between] = [
    lambda h, _: h - h.mean(0),
    lambda h, gate: h + gate * h.mean(0),
    lambda h, _: h.cumsum(0),
    in_the_backward,
]


class _Stop(Exception):
    pass


def captured_without_memory(network: nn.Module, x: Tensor) -> tuple[NetworkGraph, list[Tensor]]:
    staged, found = Staged(network), []

    def run(graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        found.append((graph, graph.bind(values)))
        raise _Stop

    staged.capture._run = run
    with pytest.raises(_Stop):
        staged(x)
    assert all(map(is_deferred, network.parameters()))
    return found[0]


def reason_without_memory(between: Between, *, others: bool) -> str | None:
    network, _ = build(lambda: Three(between))
    torch.manual_seed(1)
    graph, leaves = captured_without_memory(network, torch.randn(4, 4))
    if others:
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            offload(tensor, name, "on rank 1")
    state = torch.get_rng_state()
    reason = why_whole(graph, leaves, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(is_deferred, network.parameters()))
    return reason


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("between", MEETING)
def test_samples_that_meet_are_seen_without_weights(between: Between, others: bool) -> None:
    reason = reason_without_memory(between, others=others)
    assert reason is not None
    assert "how the batch is split" in reason


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("between", SEPARATE)
def test_samples_that_do_not_meet_are_split_without_weights(between: Between, others: bool) -> None:
    assert reason_without_memory(between, others=others) is None


def test_a_network_without_memory_is_tried_in_as_many_pieces_as_it_has_partitions() -> None:
    network, _ = build(lambda: Three(SEPARATE[0]))
    graph, _ = captured_without_memory(network, torch.randn(4, 4))
    pieces = list(Pieces(graph, CPU))
    assert len(pieces) == 3
    assert len(list(Pieces(captured(Three(SEPARATE[0]), torch.randn(4, 4)).graph, CPU))) == 1
    again = Pieces(graph, CPU)[1]
    for one, other in zip(pieces[1].tensors, again.tensors, strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()


class Attends(nn.Module):
    """Self-attention, of which a hook keeps a detached part."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = (self.queries(x) @ self.keys(x).mT).softmax(-1)
        return weights @ self.values(x), weights.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_zero_but_for_rounding_do_not_hinder_a_split(dtype: torch.dtype) -> None:
    found = captured(Attends().to(dtype), torch.randn(6, 5, 4, dtype=dtype))
    assert why_whole(found.graph, found.leaves, 2) is None
