"""A call that keeps its activations elsewhere is heard of by checkpointing around it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_hybrid._torch.autograd import (
    checkpointed_region,
    own_saved_tensors,
    saved_tensors_hooks,
)
from lightning_hybrid.driver.network_call import SavedForBackward


class Doubles(torch.autograd.Function):
    """A node that saves nothing."""

    @staticmethod
    def forward(ctx: Any, saved: SavedForBackward | None, x: Tensor) -> Tensor:
        ctx.saved = saved
        if saved is not None:
            saved.want()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        if ctx.saved is not None:
            ctx.saved.ask()
        return None, 2 * gradient


class Network:
    def __init__(self) -> None:
        self.calls = 0
        self.again: list[bool] = []

    def __call__(self, x: Tensor) -> Tensor:
        hooks = saved_tensors_hooks()
        saved = None if hooks is None else SavedForBackward(hooks)
        region = checkpointed_region(hooks)
        if region is not None:
            self.again.append(region[1])
        with own_saved_tensors():
            y = Doubles.apply(saved, Doubles.apply(saved, x))
        self.calls += 1
        if saved is not None:
            saved.save()
        return y


@pytest.mark.parametrize("around", [lambda net, x: net(x), lambda net, x: net(x).tanh().exp()])
def test_a_checkpointed_call_runs_again_once_in_each_backward(around: Any) -> None:
    network, x = Network(), torch.ones(3, requires_grad=True)
    y = checkpoint(around, network, x, use_reentrant=False)
    y.sum().backward(retain_graph=True)
    assert network.calls == 2
    y.sum().backward()
    assert network.calls == 3
    assert network.again == [False, True, True]
    expected = around(Network(), z := torch.ones(3, requires_grad=True))
    expected.sum().backward()
    assert torch.equal(x.grad, 2 * z.grad)


def test_nothing_is_saved_without_hooks_or_without_a_backward() -> None:
    network = Network()
    network(torch.ones(3, requires_grad=True)).sum().backward()
    assert network.calls == 1
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        saved = SavedForBackward(saved_tensors_hooks())
        saved.save()
        assert not packed
        network(torch.ones(3, requires_grad=True)).sum().backward()
    assert len(packed) == 1
    assert network.calls == 2
