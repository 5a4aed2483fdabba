"""The factor of parts that are measured apart is that of torch for the whole."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.state.clipping import clip_factor, gradient_norms, gradients_of, total_norm


def network(scale: float = 1.0) -> nn.Module:
    """With gradients, of which one is missing."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
    for parameter in [*net.parameters()][:-1]:
        parameter.grad = scale * torch.randn_like(parameter)
    return net


def norms_of_ranks(net: nn.Module, ranks: int, order: float) -> dict[str, Tensor]:
    """Each rank measures its own; they are heard in another order than that of the network."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    found: dict[str, Tensor] = {}
    for rank in reversed(range(ranks)):
        optimizer = torch.optim.SGD([*net.parameters()][rank::ranks], lr=1.0)
        found |= gradient_norms(optimizer, names, order)
    return found


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_gradients_times_the_factor_are_clipped_by_torch(order: float, scale: float) -> None:
    net, reference = network(scale), network(scale)
    names = [name for name, _ in net.named_parameters()]
    factor = clip_factor(total_norm(norms_of_ranks(net, 3, order), names, order), 0.1)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1, order)
    for mine, theirs in zip(net.parameters(), reference.parameters()):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            assert torch.equal(mine.grad * factor, theirs.grad)


def test_the_factor_is_the_same_to_the_bit_however_the_norms_are_spread() -> None:
    net = network()
    names = [name for name, _ in net.named_parameters()]
    norms = (norms_of_ranks(net, ranks, 2.0) for ranks in (1, 2, 3, 5))
    factors = {clip_factor(total_norm(each, names), 0.1) for each in norms}
    assert len(factors) == 1


def test_where_there_are_no_gradients_nothing_is_clipped() -> None:
    assert clip_factor(total_norm({}, ["weight"]), 0.1) == 1.0


def test_gradients_come_in_the_order_of_the_groups() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.tensor([float(number)]) if number != 2 else None
    groups: Sequence[dict[str, object]] = [
        {"params": [parameters[3]]},
        {"params": [parameters[0], parameters[2], parameters[1]]},
    ]
    found = gradients_of(torch.optim.SGD(groups, lr=1.0))
    assert [gradient.item() for gradient in found] == [3, 0, 1]


class Copies(TorchFunctionMode):
    """Counts what the host may wait for a device in."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func in (Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.numpy)
        return func(*args, **(kwargs or {}))


def test_the_norms_come_from_the_device_in_one_copy() -> None:
    net = network()
    with Copies() as copies:
        norms_of_ranks(net, 1, 2.0)
    assert copies.count == 1
