"""Which calls are none of a network."""

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.driver.captured_calls import why_on_driver

X = torch.ones(2, 3)


class Asks(nn.Module):
    """Notes, in each call, why it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.reasons: list[str | None] = []

    def forward(self, x: Tensor) -> Tensor:
        self.reasons.append(why_on_driver())
        output: Tensor = self.layer(x)
        return output


def test_a_usual_call_is_one_of_the_network() -> None:
    network = Asks()
    network(X)
    network.layer.bias = nn.Parameter(torch.zeros(3))  # replaced for good
    network(X)
    assert network.reasons == [None, None]


def test_a_call_on_tensors_of_the_callers_is_none() -> None:
    network = Asks()
    for bias in (torch.zeros(3), nn.Parameter(torch.zeros(3))):
        torch.func.functional_call(network, {"layer.bias": bias}, (X,))
        assert "functional_call" in str(network.reasons[-1])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_call_that_is_recorded_is_none() -> None:
    network = Asks()
    torch.jit.trace(network, X, check_trace=False)
    [reason] = network.reasons
    assert "torch.jit.trace or torch.export" in str(reason)


# torch's own use of TorchScript, when forward-mode derivatives are first used
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_call_inside_of_a_transform_or_on_dual_numbers_is_none() -> None:
    network = Asks()
    torch.func.vmap(network)(X)
    torch.func.jacrev(network)(X)
    with torch.autograd.forward_ad.dual_level():
        network(torch.autograd.forward_ad.make_dual(X, X))
    assert all("transform" in str(reason) for reason in network.reasons)
    assert len(network.reasons) == 3
