"""Arguments of a class of their own reach the stages as ordinary tensors, or are refused."""

from typing import Any

import pytest
import torch
from monai.data import MetaTensor
from torch import Tensor, nn

from lightning_hybrid.capture.capture import Capture, NotCaptured
from lightning_hybrid.capture.own_classes import Plain, refused_class
from lightning_hybrid.graph.graph import NetworkGraph


class Named(Tensor):
    """With torch's own way to hear of operations."""


class Doubles(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result if func is nn.functional.linear else result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["noted"] = batch["x"] + 1
        return {"y": self.layer(batch["x"]), "x": batch["x"]}


def captured(network: nn.Module, *args: Any) -> tuple[Any, list[type]]:
    """What a call returns, and the classes of what its graph was given."""
    classes: list[type] = []

    def run(graph: NetworkGraph, values: Any) -> Any:
        classes.extend(type(value) for value in values if isinstance(value, Tensor))
        return torch.fx.Interpreter(torch.fx.GraphModule(network, graph.graph)).run(*values)

    return Capture(network, network.forward, run)(args, {}), classes


def described(x: Tensor) -> MetaTensor:
    return MetaTensor(x, affine=2 * torch.eye(4), meta={"subject": "one"})


@pytest.mark.parametrize("made", [described, lambda x: x.as_subclass(Named)])
def test_a_network_returns_the_class_that_it_is_given(made: Any) -> None:
    network, x = Net(), torch.rand(3, 4)
    here, there = {"x": made(x)}, {"x": made(x)}
    given = there["x"]
    expected = network(here)
    found, classes = captured(network, there)
    assert set(classes) == {Tensor, nn.Parameter}
    assert found["x"] is given is there["x"]
    assert type(there["noted"]) is Tensor  # what the Python inside writes down is ordinary
    assert type(found["y"]) is type(expected["y"]) is type(given)
    assert torch.equal(found["y"], expected["y"])
    if made is described:
        assert found["y"].meta["subject"] == expected["y"].meta["subject"] == "one"
        assert torch.equal(found["y"].affine, expected["y"].affine)


def test_a_class_that_changes_results_is_refused_by_name() -> None:
    network = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(NotCaptured, match=r"Doubles, whose __torch_function__.*as_subclass"):
        captured(network, torch.rand(3, 4).as_subclass(Doubles))


def test_such_a_class_is_refused_outside_of_the_arguments_too() -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.by = torch.rand(4).as_subclass(Doubles)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.layer(x), self.layer.weight) + self.by

    with pytest.raises(NotCaptured, match="Doubles"):
        captured(Shifts(), torch.rand(3, 4))


def test_tensors_in_any_container_are_stood_in_for() -> None:
    x = torch.rand(2).as_subclass(Named)
    inner = [x, (x, {"deep": x})]
    with Plain((inner, x), {"more": (x,)}) as found:
        first = found.args[1]
        assert type(first) is Tensor
        assert found.args[0] is inner
        assert inner[0] is first
        assert inner[1][0] is first
        assert inner[1][1]["deep"] is first
        assert found.kwargs["more"][0] is first
        first.zero_()
    assert inner[0] is x
    assert not x.any()
    assert refused_class(x) is None
