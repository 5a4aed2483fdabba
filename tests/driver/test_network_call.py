"""A call of a network that has been cut is one node of autograd, run by all ranks."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import Model, arguments, batches, loss_of, model
from torch import Tensor, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph.graph import joined
from lightning_hybrid.graph.rows import Rows

DEVICES = [(1, 0), (1, 2, 1, 0)]


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("devices", DEVICES)
def test_the_gradient_of_the_input_is_that_of_one_device(
    replicas: Any, devices: tuple[int, ...]
) -> None:
    module, (first, second) = model(), batches(2)
    reference, replica = deepcopy(module), replicas(module, devices)
    mine, theirs = (first.clone().requires_grad_() for _ in range(2))
    loss_of(module, replica(mine) * second).backward()
    loss_of(reference, reference.net(theirs) * second).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_part_of_a_tensor_gets_its_gradient_though_the_tensor_wants_none(replicas: Any) -> None:
    module, [value] = model(), batches(1)
    reference, replica = deepcopy(module), replicas(module, (1, 0))
    mine, theirs = (torch.cat([value, value])[: len(value)].requires_grad_() for _ in range(2))
    replica(mine).sum().backward()
    reference.net(theirs).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_joined_outputs_are_no_views_and_lie_as_their_parts() -> None:
    parts = tuple(torch.randn(n, 3, 2, 4).permute(0, 3, 1, 2) for n in (2, 2, 1))
    together = joined(parts, Rows(0))
    assert not together._is_view()
    assert torch.equal(together, torch.cat(parts))
    assert together.stride() == torch.empty(5, 3, 2, 4).permute(0, 3, 1, 2).stride()


def test_autograd_grad_of_the_input_leaves_no_gradients_at_parameters(replicas: Any) -> None:
    module, [value] = model(), batches(1)
    reference, replica = deepcopy(module), replicas(module, (1, 0))
    mine, theirs = (value.clone().requires_grad_() for _ in range(2))
    [found] = torch.autograd.grad(replica(mine).sum(), mine)
    [expected] = torch.autograd.grad(reference.net(theirs).sum(), theirs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert gradients(module) == [None] * len(list(module.parameters()))


def test_a_smaller_batch_and_one_without_gradients_are_computed_by_the_same_stages(
    replicas: Any,
) -> None:
    module, [value] = model(), batches(1)
    reference, replica = deepcopy(module), replicas(module, (1, 2, 0))
    for batch in (value, value[:3], value[:1], value):
        with torch.no_grad():
            output = replica.call(arguments(replica.call, batch))[0]
        assert not output.requires_grad
        torch.testing.assert_close(output, reference.net(batch), rtol=1e-12, atol=1e-12)


def test_the_second_backward_through_a_call_needs_retain_graph(replicas: Any) -> None:
    module, [value] = model(), batches(1)
    reference, replica = deepcopy(module), replicas(module, (1, 0))
    output, expected = replica(value).sum(), reference.net(value).sum()
    for keep in (True, False):
        output.backward(retain_graph=keep)
        expected.backward(retain_graph=keep)
    for mine, theirs in zip(gradients(module.net), gradients(reference.net)):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="retain_graph=True in the first"):
        output.backward()


def test_gradients_of_gradients_are_refused(replicas: Any) -> None:
    value = batches(1)[0].requires_grad_()
    output = replicas(model(), (1, 0))(value)
    with pytest.raises(NetworkError, match=r"create_graph=True.*test_network_call\.py"):
        torch.autograd.grad(output.sum(), value, create_graph=True)


def test_frozen_parameters_and_inputs_need_no_backward(replicas: Any) -> None:
    module, [value] = model(), batches(1)
    replica = replicas(module, (1, 0))
    module.net.requires_grad_(False)
    assert not replica(value).requires_grad
    assert not replica.network.calls


class Views(nn.Module):
    """Two layers, and outputs that show one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.second(torch.tanh(self.first(x)))
        return x, x[:, :2]


@pytest.mark.parametrize("output", [0, 1])
def test_an_output_in_the_memory_of_another_one_is_not_changed_in_place(
    replicas: Any, output: int
) -> None:
    module, [value] = Model(Views()).double(), batches(1)
    found = replicas(module, (1, 0))(value)
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        found[output].mul_(2)


class Transposes(nn.Module):
    """Its output lies in memory in another order than its dimensions."""

    def __init__(self, *dimensions: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 5), nn.Linear(5, 2)
        self.dimensions = dimensions

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x[..., None]))).permute(self.dimensions)


@pytest.mark.parametrize("dimensions", [(0, 1, 2), (0, 2, 1)])
def test_outputs_of_parts_are_joined_as_they_lie_in_memory(
    replicas: Any, dimensions: tuple[int, ...]
) -> None:
    module, [value] = Model(Transposes(*dimensions)).double(), batches(1)
    expected = deepcopy(module).net(value)
    found = replicas(module, (1, 0))(value)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.stride() == expected.stride()
