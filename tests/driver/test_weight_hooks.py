"""Hooks on the gradients of weights hear of a backward pass once, of the sum of all pieces."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.driver.weight_hooks import WeightHooks

HERE: Any = SimpleNamespace(has=lambda _: False)
"""No worker owns a weight."""


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False)


def pieces(layer: nn.Module, value: Tensor) -> None:
    """A backward pass in two pieces."""
    for part in value.chunk(2):
        layer(part).sum().backward()


def test_a_hook_changes_the_sum_of_the_pieces(layer: nn.Linear) -> None:
    layer.weight.register_hook(lambda g: g.clamp(-1, 1))
    hooks, value = WeightHooks(layer), torch.randn(4, 3)
    hooks.hold(HERE)
    pieces(layer, value)
    hooks.release(HERE)
    torch.testing.assert_close(layer.weight.grad, value.sum(0, keepdim=True).clamp(-1, 1))


def test_what_accumulates_is_as_without_pieces(layer: nn.Linear) -> None:
    heard: list[Tensor] = []
    layer.weight.register_hook(lambda g: g * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone()))
    hooks, value = WeightHooks(layer), torch.randn(4, 3)
    for _ in range(2):
        hooks.hold(HERE)
        pieces(layer, value)
        hooks.release(HERE)
    once = 2 * value.sum(0, keepdim=True)
    torch.testing.assert_close(heard, [once, 2 * once])


def test_who_has_kept_a_gradient_sees_what_is_added(layer: nn.Linear) -> None:
    layer.weight.register_hook(lambda g: g)
    layer.weight.grad = kept = torch.zeros(1, 3)
    hooks = WeightHooks(layer)
    hooks.hold(HERE)
    pieces(layer, torch.ones(4, 3))
    hooks.release(HERE)
    assert layer.weight.grad is kept
    assert kept.tolist() == [[4, 4, 4]]


def test_after_a_pass_that_has_failed_none_is_called(layer: nn.Linear) -> None:
    heard: list[str] = []
    layer.weight.register_hook(lambda g: heard.append("sum"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: heard.append("late"))
    hooks = WeightHooks(layer)
    hooks.hold(HERE)
    pieces(layer, torch.ones(4, 3))
    hooks.release(HERE, call=False)
    assert heard == []
    assert hooks
    assert layer.weight.grad is not None


def test_a_weight_without_a_gradient_is_not_heard_of(layer: nn.Linear) -> None:
    layer.weight.register_hook(lambda g: pytest.fail("there is none"))
    hooks = WeightHooks(layer)
    hooks.hold(HERE)
    hooks.release(HERE)
    assert layer.weight.grad is None


def test_a_handle_removes_its_hook_at_any_time(layer: nn.Linear) -> None:
    handle = layer.weight.register_hook(lambda g: pytest.fail("removed"))
    hooks = WeightHooks(layer)
    assert hooks
    hooks.hold(HERE)
    pieces(layer, torch.ones(4, 3))
    handle.remove()
    hooks.release(HERE)
    assert not hooks
