"""The norm of gradients that lie on several ranks is that of torch for the whole."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_hybrid.comm import Answer
from lightning_hybrid.comm.message_channel import encode
from lightning_hybrid.state.clipping_and_loss_scale import gradient_norms, gradients_of, total_norm


def network(missing: int = 0) -> nn.Module:
    """With gradients, of which one is missing."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    [*net.parameters()][missing].grad = None
    return net


def total_of_ranks(net: nn.Module, ranks: int, order: float = 2.0) -> Tensor:
    """Each of ``ranks`` has the gradients of some; the last parameter is the driver's alone."""
    *known, driver_only = net.parameters()
    norms = []
    for rank in range(ranks):
        mine = [Parameter(p.detach()) for p in known]
        for parameter, original in [*zip(mine, known)][rank::ranks]:
            parameter.grad = original.grad
        norms.append(gradient_norms(mine, order))
    return total_norm(norms, gradient_norms([driver_only], order), order)


@pytest.mark.parametrize("ranks", [1, 3, 20])
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("missing", [0, -1])
def test_the_norm_of_spread_gradients_is_that_of_torch_to_the_bit(
    ranks: int, order: float, missing: int
) -> None:
    net = network(missing)
    expected = nn.utils.clip_grad_norm_(net.parameters(), torch.inf, order)
    assert torch.equal(total_of_ranks(net, ranks, order), expected)


def test_a_norm_that_is_not_a_number_is_not_taken_for_a_missing_one() -> None:
    net = network()
    next(p.grad for p in net.parameters() if p.grad is not None)[0] = torch.nan
    assert total_of_ranks(net, 3).isnan()


def test_where_there_are_no_gradients_the_norm_is_nothing() -> None:
    nothing = gradient_norms([Parameter(torch.zeros(1))], 2.0)
    assert total_norm([nothing, nothing], nothing).item() == 0.0


def test_norms_of_many_gradients_travel_as_one_small_message() -> None:
    net = nn.ParameterList(Parameter(torch.zeros(4)) for _ in range(1000))
    for parameter in net:
        parameter.grad = torch.ones(4)
    _, data, tensors = encode(Answer(tensors=(("norms", gradient_norms([*net])),)))
    assert len(data) + sum(tensor.nbytes for tensor in tensors) < 6 * len(net)


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
        gradient_norms([*net.parameters()])
    assert copies.count == 1
