"""Functions that keep their results: called once where it matters, followed where it does not."""

# ruff: noqa: B019 (networks of these tests live as long as the process)

import functools
import warnings

import pytest
import torch
from capturing import Staged
from torch import Tensor, nn

from lightning_hybrid.network import NotCaptured

X = torch.randn(3, 4)


class Net(nn.Module):
    """Multiplies by what a function that keeps its results has made."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.name, self.calls = name, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * getattr(self, self.name)(4))

    @functools.cache
    def draws(self, width: int) -> Tensor:
        return torch.randn(width)

    @functools.lru_cache(maxsize=2)
    def drops(self, width: int) -> Tensor:
        return nn.functional.dropout(torch.ones(width))

    @functools.cache
    def counts(self, width: int) -> int:
        self.calls.append(width)
        return width

    @functools.cache
    def norms(self, width: int) -> Tensor:
        return self.second.weight.detach().norm() * width

    @functools.cache
    def follows(self, width: int) -> Tensor:
        numbers = []
        for number in range(width):
            numbers.append(number / width)
        return torch.tensor(numbers)

    @functools.cache
    def nested(self, width: int) -> Tensor:
        return self.follows(width) + self.draws(width)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("draws", "Net.draws.*draws random numbers"),
        ("drops", "Net.drops.*draws random numbers"),
        ("counts", "Net.counts.*changes something"),
        ("norms", "Net.norms.*reads weights"),
        ("nested", "Net.draws.*draws random numbers"),
    ],
)
def test_a_function_whose_one_call_differs_from_many_is_not_followed(
    name: str, reason: str
) -> None:
    with pytest.raises(NotCaptured, match=rf"{reason}[^$]*test_cached_functions.py"):
        Staged(Net(name))(X)


def test_one_whose_result_follows_from_its_arguments_is_followed_without_a_warning() -> None:
    network = Net("follows")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        staged = Staged(network)
        for _ in range(2):
            assert torch.equal(staged(X), network(X))
    assert len(staged.graphs) == 1
