"""What a step calls is seen without changing what it computes, and then let go."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.driver.foreseen_calls import ForeseenCalls
from lightning_hybrid.errors import NetworkNotFoundError


class Model(nn.Module):
    """Its own Python decides on a value, between two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.head(y if y.sum().item() > -1e9 else x)


def test_the_first_call_of_a_network_is_seen_and_computes_what_it_computes() -> None:
    net, x = Model(), torch.randn(6, 4)
    expected = net.body(x)
    looked = ForeseenCalls(copy.deepcopy(net), ["body"])
    watched = next(iter(looked._watched.values()))
    torch.testing.assert_close(watched(x), expected, rtol=0, atol=0)
    watched(torch.randn(3, 4))
    [seen] = looked.seen
    assert (seen.name, seen.graph.batch_of(seen.leaves)) == ("body", 6)
    assert [partition.name for partition in seen.partitions] == ["0", "2"]


def test_where_python_cannot_be_followed_the_modules_that_it_calls_are_seen() -> None:
    net, x = Model(), torch.randn(6, 4)
    expected = net(x)
    copied = copy.deepcopy(net)
    looked = ForeseenCalls(copied, None)
    torch.testing.assert_close(copied(x), expected, rtol=0, atol=0)
    assert [seen.name for seen in looked.seen] == ["body", "head"]
    assert "cannot be captured as one graph" in looked.problems[0]


def test_nothing_keeps_the_copy() -> None:
    copied = copy.deepcopy(Model().body)
    looked, alive = ForeseenCalls(copied, None), weakref.ref(copied)
    copied(torch.randn(6, 4))
    assert looked.seen
    looked.close()
    del looked, copied
    gc.collect()
    assert alive() is None


def test_a_module_without_parameters_is_no_network() -> None:
    with pytest.raises(NetworkNotFoundError):
        ForeseenCalls(nn.ReLU(), None)
