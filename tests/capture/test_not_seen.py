"""What TorchDynamo does not guard: a captured call goes on as if nothing had changed.

This is the list in `docs/what_you_can_rely_on.md`. A case that fails is one that torch has learned
to see, and leaves the list.
"""

# ruff: noqa: B019 (networks of these tests live as long as the process)

import functools
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capturing import Staged
from torch import Tensor, nn

X = torch.randn(3, 4)


class Sized:
    pass


class Attributes(dict[str, float]):
    scale: float


class Metered(type):
    rate = 1.0


class Meter(metaclass=Metered):
    pass


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Net(nn.Module):
    def __init__(self, look: Callable[["Net"], Any]) -> None:
        super().__init__()
        self.look = look
        self.layer, self.part = nn.Linear(4, 4), Part()
        self.table: dict[Any, float] = {}
        self.settings, self.sized = SimpleNamespace(), Sized()
        self.attributes = Attributes()
        self.attributes.scale = 1.0
        self.recent: deque[float] = deque([1.0, 2.0], maxlen=2)
        self.order = OrderedDict(a=1.0, b=2.0)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.part(x)) * self.look(self)

    @functools.cache
    def kept(self) -> float:
        return self.scale


def key(net: Net) -> float:
    try:
        return net.table["scale"]
    except KeyError:
        return 1.0


def attribute(net: Net) -> float:
    try:
        return net.settings.scale  # type: ignore[no-any-return]
    except AttributeError:
        return 1.0


def length(net: Net) -> float:
    return 1.0 if net.sized else 0.5


CHANGES: list[tuple[str, Callable[[Net], Any], Callable[[Net], object]]] = [
    ("a key that was looked for in vain", key, lambda net: net.table.update(scale=0.5)),
    (
        "an attribute that was looked for in vain",
        attribute,
        lambda net: setattr(net.settings, "scale", 0.5),
    ),
    (
        "a variable of the environment",
        lambda _: float(os.environ.get("NOT_SEEN", "1")),
        lambda _: os.environ.update(NOT_SEEN="0.5"),
    ),
    (
        "the order of a dictionary",
        lambda net: next(iter(net.order.values())),
        lambda net: net.order.move_to_end("a"),
    ),
    ("a length", length, lambda net: setattr(type(net.sized), "__len__", lambda _: 0)),
    (
        "an attribute of an empty dictionary",
        lambda net: net.attributes.scale,
        lambda net: setattr(net.attributes, "scale", 0.5),
    ),
    ("an attribute of a metaclass", lambda _: Meter.rate, lambda _: setattr(Metered, "rate", 0.5)),
    (
        "a forward of a class",
        lambda _: 1.0,
        lambda net: setattr(type(net.part), "forward", lambda _, x: 2 * x),
    ),
]


@pytest.fixture
def undone() -> Iterator[None]:
    forward = Part.forward
    yield
    os.environ.pop("NOT_SEEN", None)
    Part.forward, Metered.rate = forward, 1.0  # type: ignore[method-assign]
    if hasattr(Sized, "__len__"):
        del Sized.__len__


@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize(
    ("look", "change"), [each[1:] for each in CHANGES], ids=[each[0] for each in CHANGES]
)
def test_a_change_of_what_torch_compile_does_not_look_at_is_not_seen(
    look: Callable[[Net], Any], change: Callable[[Net], object]
) -> None:
    """A key, an attribute or a variable of the environment that the network looks for and
    that comes later.
    """
    network = Net(look)
    staged = Staged(network)
    before = network(X)
    assert torch.equal(staged(X), before)
    change(network)
    assert torch.equal(staged(X), before)
    assert len(staged.graphs) == 1


@pytest.mark.usefixtures("undone")
def test_hooks_on_all_modules_of_the_process_are_not_seen_once_a_call_was_captured() -> None:
    """A hook on all modules of the process that comes or goes after the first call."""
    network = Net(lambda _: 1.0)
    staged = Staged(network)
    before = staged(X)
    handle = nn.modules.module.register_module_forward_hook(lambda *given: 2 * given[-1])
    try:
        assert torch.equal(staged(X), before)
    finally:
        handle.remove()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_function_that_keeps_its_results_is_followed_as_if_it_did_not() -> None:
    """A function that keeps its results (`functools.cache`) is called each time."""
    network = Net(Net.kept)
    staged = Staged(network)
    before = network(X)
    assert torch.equal(staged(X), before)
    network.scale = 0.5
    assert torch.equal(network(X), before)
    assert torch.equal(staged(X), 0.5 * before)


def test_a_full_queue_has_one_element_more_where_the_network_appends_to_it() -> None:
    """A full `deque(maxlen=...)` to which the network appends has one element more in that call."""

    def remember(net: Net) -> float:
        net.recent.append(3.0)
        return sum(net.recent)

    network = Net(remember)
    expected, layer = deepcopy(network)(X), network.layer(X)
    assert torch.equal(expected, layer * 5.0)
    assert torch.equal(Staged(network)(X), layer * 6.0)


def test_code_that_asks_whether_it_is_compiled_is_told_so() -> None:
    """`torch.compiler.is_compiling()` is true."""
    network = Net(lambda _: 2.0 if torch.compiler.is_compiling() else 1.0)
    assert torch.equal(Staged(network)(X), 2 * network(X))
