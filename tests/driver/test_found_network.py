"""How modules that the user calls are named and told apart."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_hybrid.driver.found_network import (
    FoundNetwork,
    count,
    inside,
    modules_with_parameters,
)
from lightning_hybrid.errors import NetworkError


@pytest.mark.parametrize(
    ("name", "outer", "expected"),
    [
        ("net.layer", "net", True),
        ("net", "net", True),
        ("network", "net", False),
        ("anything", "", True),
        ("net", "net.layer", False),
    ],
)
def test_a_module_is_inside_of_those_that_its_name_begins_with(
    name: str, outer: str, expected: bool
) -> None:
    assert inside(name, outer) is expected


def test_layers_are_the_modules_that_own_parameters_themselves() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
    assert modules_with_parameters(network) == [network[0], network[2][0]]


def test_one_thing_is_no_plural() -> None:
    assert [count(number, "stage") for number in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]


def chain(*owned: set[str]) -> FoundNetwork:
    """A chain of graphs whose networks own these tensors."""
    nothing: Any = None
    found = FoundNetwork("net", nn.Linear(2, 2), nothing, nothing, False, "    it prints")
    found.driven += [(_network(names), nothing) for names in owned]
    return found


def _network(names: set[str]) -> Any:
    return SimpleNamespace(owned_names=frozenset(names))


def graph(*used: str) -> Any:
    return SimpleNamespace(used=frozenset(used))


def test_a_graph_belongs_to_the_network_whose_weights_it_uses() -> None:
    found = chain({"a", "b"}, {"c"})
    assert found.network_of(graph("b")) is found.driven[0]
    assert found.network_of(graph("c", "d")) is found.driven[1]
    assert found.network_of(graph("d")) is None


def test_a_graph_with_weights_of_two_networks_is_refused_with_the_reason_of_the_chain() -> None:
    with pytest.raises(NetworkError, match="two of its graphs share 'c':\n    it prints"):
        chain({"a"}, {"c"}).network_of(graph("a", "c"))
