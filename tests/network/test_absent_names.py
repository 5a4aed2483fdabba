"""What captured code has looked for in vain is found once it is there, as without a capture."""

import os
import threading
from collections import ChainMap, OrderedDict, UserDict
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid._torch.capture import capture_settings

CASES: list[Any] = []
settings = ModuleType("settings")
local = threading.local()


class Base:
    inherited = 1.0

    def method(self) -> float:
        return 1.0


class Derived(Base):
    pass


class Answers:
    """Has what it is asked for, by `__getattr__`."""

    def __init__(self) -> None:
        self.table = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["table"][name]
        except KeyError:
            raise AttributeError(name) from None


class Slots:
    __slots__ = ("scale",)


class Attributes(dict[str, Any]):
    """A dictionary with attributes."""


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


PART_FORWARD = Part.forward


def function() -> None:
    pass


class Net(nn.Module):
    def __init__(self, look: Callable[["Net"], float]) -> None:
        super().__init__()
        self.look = look
        self.table: dict[Any, Any] = {"held": {}}
        self.ordered: OrderedDict[str, float] = OrderedDict()
        self.mapping: UserDict[str, float] = UserDict()
        self.chain: ChainMap[str, float] = ChainMap({}, {"scale": 1.0})
        self.space, self.slots, self.answers = SimpleNamespace(), Slots(), Answers()
        self.derived, self.attributes = Derived(), Attributes(known=1.0)
        self.attributes.known = 1.0
        self.parts, self.part = nn.ModuleDict(), Part()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.look(self)


def changed_by(change: Callable[[Net], object]) -> Callable[[Any], Any]:
    """A case: how `look` finds another value after `change`."""

    def note(look: Callable[[Net], float]) -> Callable[[Net], float]:
        CASES.append(pytest.param(look, change, id=look.__name__))
        return look

    return note


@changed_by(lambda net: net.table.update(scale=0.5))
def a_key(net: Net) -> float:
    try:
        return net.table["scale"]
    except KeyError:
        return 1.0


@changed_by(lambda net: net.table["held"].update(scale=0.5))
def a_key_of_a_dictionary_in_a_dictionary(net: Net) -> float:
    try:
        return net.table["held"]["scale"]
    except KeyError:
        return 1.0


@changed_by(lambda net: net.table.update({("scale", 1): 0.5}))
def a_tuple_as_key(net: Net) -> float:
    try:
        return net.table["scale", 1]
    except KeyError:
        return 1.0


@changed_by(lambda net: net.ordered.update(scale=0.5))
def a_key_of_an_ordered_dictionary(net: Net) -> float:
    try:
        return net.ordered["scale"]
    except KeyError:
        return 1.0


@changed_by(lambda net: net.mapping.update(scale=0.5))
def a_key_of_a_mapping(net: Net) -> float:
    try:
        return net.mapping["scale"]
    except KeyError:
        return 1.0


@changed_by(lambda net: net.chain.maps[0].update(scale=0.5))
def a_key_of_the_first_of_two_mappings(net: Net) -> float:
    return net.chain["scale"]


@changed_by(lambda net: net.parts.add_module("part", nn.Identity()))
def a_module_of_a_module_dict(net: Net) -> float:
    try:
        return 0.5 if net.parts["part"] is not None else 1.0
    except KeyError:
        return 1.0


@changed_by(lambda _: os.environ.update(NET_SCALE="0.5"))
def a_variable_of_the_environment(net: Net) -> float:
    return float(os.environ.get("NET_SCALE", "1"))


@changed_by(lambda _: os.environ.update(NET_SCALE="0.5"))
def a_variable_of_the_environment_by_getenv(net: Net) -> float:
    return float(os.getenv("NET_SCALE", "1"))


@changed_by(lambda net: setattr(net, "scale", 0.5))
def an_attribute_of_the_network(net: Net) -> float:
    try:
        return net.scale  # type: ignore[return-value]
    except AttributeError:
        return 1.0


@changed_by(lambda net: net.register_buffer("scale", torch.tensor(0.5)))
def a_buffer_of_the_network(net: Net) -> float:
    try:
        return 0.5 if net.scale is not None else 1.0
    except AttributeError:
        return 1.0


@changed_by(lambda net: setattr(net.space, "scale", 0.5))
def an_attribute_of_an_object(net: Net) -> float:
    try:
        return net.space.scale
    except AttributeError:
        return 1.0


@changed_by(lambda net: setattr(net.slots, "scale", 0.5))
def an_attribute_in_slots(net: Net) -> float:
    try:
        return net.slots.scale
    except AttributeError:
        return 1.0


@changed_by(lambda _: setattr(local, "scale", 0.5))
def an_attribute_of_a_thread(net: Net) -> float:
    try:
        return local.scale
    except AttributeError:
        return 1.0


@changed_by(lambda _: setattr(Derived, "own", 0.5))
def an_attribute_of_a_class(net: Net) -> float:
    try:
        return Derived.own  # type: ignore[attr-defined]
    except AttributeError:
        return 1.0


@changed_by(lambda _: setattr(Derived, "inherited", 0.5))
def an_attribute_that_a_base_class_gives(net: Net) -> float:
    return net.derived.inherited


@changed_by(lambda _: setattr(Derived, "method", lambda self: 0.5))
def a_method_that_a_base_class_gives(net: Net) -> float:
    return net.derived.method()


@changed_by(lambda _: setattr(Part, "forward", lambda self, x: 0.5 * x))
def the_forward_of_a_class_of_modules(net: Net) -> float:
    return net.part(torch.ones(1))  # type: ignore[no-any-return]


@changed_by(lambda net: setattr(net.weight, "scale", 0.5))
def an_attribute_of_a_tensor(net: Net) -> float:
    try:
        return net.weight.scale  # type: ignore[return-value]
    except AttributeError:
        return 1.0


@changed_by(lambda _: setattr(settings, "scale", 0.5))
def an_attribute_of_a_module(net: Net) -> float:
    try:
        return settings.scale  # type: ignore[attr-defined]
    except AttributeError:
        return 1.0


@changed_by(lambda _: setattr(settings, "scale", 0.5))
def whether_a_module_has_an_attribute(net: Net) -> float:
    return 0.5 if hasattr(settings, "scale") else getattr(settings, "scale", 1.0)


@changed_by(lambda _: setattr(function, "scale", 0.5))
def an_attribute_of_a_function(net: Net) -> float:
    try:
        return function.scale  # type: ignore[attr-defined]
    except AttributeError:
        return 1.0


@changed_by(lambda _: setattr(function, "scale", 0.5))
def an_attribute_of_a_function_or_a_default(net: Net) -> float:
    return getattr(function, "scale", 1.0)


@changed_by(lambda net: setattr(net.answers, "scale", 0.5))
def what_getattr_gives(net: Net) -> float:
    return net.answers.scale


@changed_by(lambda net: net.answers.table.update(other=0.5))
def what_getattr_does_not_give(net: Net) -> float:
    try:
        return net.answers.other
    except AttributeError:
        return 1.0


@changed_by(lambda net: setattr(net.space, "scale", 0.5))
def a_key_of_vars(net: Net) -> float:
    return vars(net.space).get("scale", 1.0)


@changed_by(lambda net: setattr(net.space, "scale", 0.5))
def keywords_of_vars(net: Net) -> float:
    return dict(**vars(net.space)).get("scale", 1.0)


@changed_by(lambda net: setattr(net.space, "scale", 0.5))
def a_copy_of_vars(net: Net) -> float:
    return vars(net.space).copy().get("scale", 1.0)


@changed_by(lambda net: setattr(net.attributes, "scale", 0.5))
def an_attribute_of_a_dictionary(net: Net) -> float:
    return getattr(net.attributes, "scale", 1.0)


@changed_by(lambda net: setattr(net.attributes, "known", 0.5))
def another_value_of_an_attribute_of_a_dictionary(net: Net) -> float:
    return net.attributes.known


@pytest.fixture
def undone() -> Any:
    """Takes back what the cases change outside of their network."""
    yield
    os.environ.pop("NET_SCALE", None)
    for owner, names in ((Derived, ("own", "inherited", "method")), (settings, ("scale",))):
        for name in names:
            with suppress(AttributeError):
                delattr(owner, name)
    Part.forward = PART_FORWARD  # type: ignore[method-assign]
    vars(function).clear()
    vars(local).clear()


@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize(("look", "change"), CASES)
def test_what_was_missing_is_found(
    look: Callable[[Net], float], change: Callable[[Net], object]
) -> None:
    torch._dynamo.reset()
    net = Net(look)
    captured = torch.compile(net, backend="eager", fullgraph=True)
    with capture_settings():
        assert captured(torch.ones(1)).item() == 1.0
    change(net)
    with capture_settings():
        assert captured(torch.ones(1)).item() == 0.5
    assert net(torch.ones(1)).item() == 0.5


def test_outside_of_a_capture_torch_is_as_it_was() -> None:
    from torch._dynamo.variables.dicts import ConstDictVariable, DunderDictVariable

    name = "getitem_const_raise_exception_if_absent"
    before = getattr(ConstDictVariable, name)
    with capture_settings():
        assert getattr(ConstDictVariable, name) is not before
    assert getattr(ConstDictVariable, name) is before
    assert name not in vars(DunderDictVariable)
