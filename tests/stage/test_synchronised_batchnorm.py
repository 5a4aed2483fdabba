"""Batch statistics over two ranks are those of torch's own layer on the union of their batches."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nccl_rules import StrictGroup
from ranks import gloo_groups, together
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.comm.connections import GroupHandle
from lightning_hybrid.stage.synchronised_batchnorm import Synchronised

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "samples": (nn.BatchNorm1d(3), (3,)),
    "sequences": (nn.BatchNorm1d(3), (3, 4)),
    "volumes": (nn.BatchNorm3d(3), (3, 2, 4, 3)),
    "without weights": (nn.BatchNorm2d(3, affine=False), (3, 4, 2)),
    "without running statistics": (nn.BatchNorm1d(3, track_running_stats=False), (3,)),
    "mean of all batches": (nn.BatchNorm1d(3, momentum=None), (3,)),
}
NOBODY: Any = SimpleNamespace(size=lambda: 2)  # a collective with it would be an error


@pytest.fixture(scope="module")
def groups() -> Iterator[list[Any]]:
    handles = [GroupHandle(StrictGroup(group)) for group in gloo_groups(30)]
    yield handles
    for handle in handles:
        handle.close()


def layer(kind: nn.Module) -> nn.Module:
    """With weights that are not those of the start."""
    made = deepcopy(kind).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(3, generator=generator))
    return made


def batches(shape: tuple[int, ...], sizes: Sequence[int] = (3, 5)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    made = [torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in sizes]
    return [(7 + 2 * part).requires_grad_() for part in made]


def step(module: nn.Module, x: Tensor, first: int) -> Tensor:
    """Forward and backward; the gradient depends on the place of a sample in the union."""
    output: Tensor = module(x)
    places = torch.arange(first * output[0].numel(), output.numel() + first * output[0].numel())
    (output * places.view_as(output).sin()).sum().backward()
    return output.detach()


def on_ranks(groups: list[Any], layers: list[nn.Module], parts: list[Tensor]) -> list[Tensor]:
    def rank(number: int) -> Tensor:
        with Synchronised(groups[number]):
            return step(layers[number], parts[number], number * len(parts[0]))

    return together(lambda: rank(0), lambda: rank(1))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sizes", [(3, 5), (1, 2)])
def test_outputs_statistics_and_gradients_are_those_of_the_union(
    groups: list[Any], name: str, sizes: tuple[int, int]
) -> None:
    kind, shape = LAYERS[name]
    layers, parts, reference = [layer(kind), layer(kind)], batches(shape, sizes), layer(kind)
    for _ in range(2):
        found = on_ranks(groups, layers, parts)
        union = torch.cat([part.detach() for part in parts]).requires_grad_()
        expected = step(reference, union, 0)
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=1e-12)
    assert union.grad is not None
    for part, gradient in zip(parts, union.grad.split(sizes)):
        torch.testing.assert_close(part.grad, 2 * gradient, rtol=1e-10, atol=1e-12)
    for mine, theirs, wanted in zip(*(net.parameters() for net in (*layers, reference))):
        torch.testing.assert_close(mine.grad + theirs.grad, wanted.grad, rtol=1e-10, atol=1e-12)
    for mine, theirs, wanted in zip(*(net.buffers() for net in (*layers, reference))):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(mine, theirs)  # to the bit


class Again(nn.Module):
    """A layer that runs again in the backward."""

    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return output


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_run_again_in_the_backward_have_the_statistics_of_the_union(
    groups: list[Any], reentrant: bool
) -> None:
    whole = Again(layer(nn.BatchNorm1d(3)), reentrant)
    layers: list[nn.Module] = [deepcopy(whole), deepcopy(whole)]
    parts = batches((3,))
    x = torch.cat([part.detach() for part in parts]).requires_grad_()
    step(whole, x, 0)
    on_ranks(groups, layers, parts)
    torch.testing.assert_close(torch.cat([part.grad for part in parts]), x.grad)  # type: ignore[arg-type,misc]
    for mine in layers:
        torch.testing.assert_close(mine.state_dict(), whole.state_dict())


def test_a_backward_of_what_needs_no_gradient_is_refused_as_ever() -> None:
    with Synchronised(NOBODY):
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).sum().backward()
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            torch.ones(2, requires_grad=True).backward()
        with pytest.raises(RuntimeError, match="only for real scalar outputs"):
            torch.ones((), dtype=torch.complex64, requires_grad=True).backward()


@pytest.mark.parametrize(
    "backward",
    [
        lambda x: x.sum().backward(),
        lambda x: (2 * x).backward(torch.arange(3.0)),
        lambda x: torch.autograd.backward([x.sum(), 3 * x], [None, torch.ones(3)]),
        lambda x: (x * x).sum().backward(inputs=[x]),
    ],
    ids=["scalar", "gradient", "several", "inputs"],
)
def test_every_form_of_a_backward_gives_the_gradients_of_torch(backward: Any) -> None:
    x = torch.arange(3.0, requires_grad=True)
    expected = x.detach().clone().requires_grad_()
    with Synchronised(NOBODY):
        backward(x)
    backward(expected)
    assert expected.grad is not None
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]


def test_inputs_and_weights_that_are_not_trained_get_no_gradient(groups: list[Any]) -> None:
    layers = [layer(nn.BatchNorm1d(3)) for _ in range(2)]
    for each in layers:
        each.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    parts = [part.detach() for part in batches((3,))]
    on_ranks(groups, layers, parts)
    reference = layer(nn.BatchNorm1d(3))
    step(reference, torch.cat(parts), 0)
    assert all(each.weight.grad is None for each in layers)
    total = layers[0].bias.grad + layers[1].bias.grad  # type: ignore[operator]
    torch.testing.assert_close(total, reference.bias.grad)


def test_of_half_precision_the_statistics_are_taken_in_float32(groups: list[Any]) -> None:
    layers = [layer(nn.BatchNorm1d(3)).float() for _ in range(2)]
    parts = [part.detach().bfloat16().requires_grad_() for part in batches((3,), (300, 500))]
    found = on_ranks(groups, layers, parts)
    wide = torch.cat([part.detach() for part in parts]).float().requires_grad_()
    reference = layer(nn.BatchNorm1d(3)).float()
    expected = step(reference, wide, 0)
    assert {value.dtype for value in found} == {parts[0].dtype}
    assert parts[0].grad is not None
    assert parts[0].grad.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(found), expected.bfloat16(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(layers[0].running_var, reference.running_var)


class NoHost(TorchFunctionMode):
    """Complains where a device would wait for numbers of the host, or the host for the device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func not in (torch.tensor, Tensor.new_tensor, Tensor.cpu, Tensor.item), func
        return func(*args, **(kwargs or {}))


def test_no_host_waits_for_a_device_in_it(groups: list[Any]) -> None:
    layers = [layer(nn.BatchNorm1d(3)) for _ in range(2)]
    parts = batches((3,))

    def rank(number: int) -> Tensor:
        with NoHost(), Synchronised(groups[number]):
            return step(layers[number], parts[number], 0)

    together(lambda: rank(0), lambda: rank(1))


@pytest.mark.parametrize("why", ["evaluation", "one replica"])
def test_a_rank_that_is_by_itself_has_the_numbers_of_torch(why: str) -> None:
    module, [x, _] = layer(nn.BatchNorm1d(3)), batches((3,))
    reference = deepcopy(module)
    for each in (module, reference):
        each.train(why != "evaluation")
    group: Any = SimpleNamespace(size=lambda: 1) if why == "one replica" else NOBODY
    with Synchronised(group):
        found = module(x)
    assert torch.equal(found, reference(x))
    assert torch.equal(module.running_mean, reference.running_mean)  # type: ignore[arg-type]
