"""Arguments of a class of their own reach the stages as ordinary tensors, or are refused."""

from typing import Any

import pytest
import torch
from monai.data import MetaTensor
from torch import Tensor, nn

from lightning_hybrid.capture.capture import Capture, NotCaptured
from lightning_hybrid.capture.own_classes import refused_class
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

    def forward(self, x: Tensor, noted: dict[str, Tensor]) -> dict[str, Tensor]:
        noted["noted"] = x + 1
        return {"y": self.layer(x), "x": x}


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
    given, noted = made(x), dict[str, Tensor]()
    expected = network(made(x), {})
    found, classes = captured(network, given, noted)
    assert set(classes) == {Tensor, nn.Parameter}
    assert found["x"] is given
    assert type(noted["noted"]) is Tensor  # what the Python inside writes down is ordinary
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


def test_such_a_class_inside_of_a_container_is_refused() -> None:
    x = torch.rand(3, 4).as_subclass(Named)
    with pytest.raises(NotCaptured, match="a list or dictionary that it takes has a Named inside"):
        captured(Net(), x, {"x": x})


def test_two_arguments_that_are_one_tensor_stay_one() -> None:
    seen = []

    class Same(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            seen.append(x is y)
            return super().forward(x, {})

    x = torch.rand(3, 4).as_subclass(Named)
    found, _ = captured(Same(), x, x)
    assert seen == [True]
    assert found["x"] is x
    assert refused_class(x) is None
