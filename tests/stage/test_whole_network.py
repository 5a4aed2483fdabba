import pytest
import torch
from captured_networks import ResNet
from capturing import captured
from torch import Tensor, nn

from lightning_hybrid.graph import why_whole
from lightning_hybrid.stage import own_copy, with_saved


class Pooled(nn.Module):
    """Mixes the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x - x.mean(0)


def test_network_that_mixes_samples_is_not_split() -> None:
    found = captured(Pooled(), torch.randn(4, 4))
    assert "samples meet in 'mean'" in str(why_whole(found.graph, found.leaves, 2))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_does_not_keep_a_network_from_being_split(training: bool) -> None:
    network = ResNet(blocks=(1, 1)).train(training)
    found = captured(network, torch.randn(6, 1, 16, 16, 16))
    state = {name: value.clone() for name, value in network.state_dict().items()}
    assert why_whole(found.graph, found.leaves, 3) is None
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


def test_hooks_on_saved_tensors_are_left_out_where_torch_refuses_them() -> None:
    seen: list[Tensor] = []

    def slope() -> Tensor:
        found: Tensor = torch.func.grad(lambda y: torch.tanh(y).sum())(torch.zeros(3))
        return found

    def keep(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    assert with_saved(slope, keep, lambda kept: kept).tolist() == [1.0, 1.0, 1.0]
    x = torch.ones(3, requires_grad=True)
    with_saved(lambda: (x * x).sum(), keep, lambda kept: kept)
    assert seen


def test_an_error_of_the_code_itself_is_raised() -> None:
    def fails() -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        with_saved(fails, lambda kept: kept, lambda kept: kept)


def test_an_own_copy_shares_no_memory() -> None:
    weight = nn.Parameter(torch.ones(2))
    copy = own_copy(weight, weight.device)
    with torch.no_grad():
        copy.zero_()
    assert copy.requires_grad
    assert weight.tolist() == [1.0, 1.0]
