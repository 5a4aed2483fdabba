"""A proxy asks its source before its numbers are used, and tells it when they have changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote.proxy import (
    RemoteParameter,
    RemoteTensor,
    make_plain,
    make_proxy,
    read_now,
    source_of,
)

TRUTH = torch.tensor([1.0, 2.0, 3.0])


class Elsewhere:
    """Another rank, which has `TRUTH`; this one has zeros until it asks.

    Args:
        kind: parameter or buffer.
        requires_grad: of a parameter.

    Attributes:
        proxy: of what the other rank has.
        table: itself: it is asked by its proxy.
        heard: what the proxy has asked or told.
        grad: what it has as gradient.
    """

    name = "net.weight"
    device = torch.device("cpu")

    def __init__(self, kind: type = nn.Parameter, requires_grad: bool = True) -> None:
        here: Any = nn.Parameter(torch.zeros(3), requires_grad)
        self.table = self
        source: Any = self
        self.proxy: Any = make_proxy(here if kind is nn.Parameter else torch.zeros(3), source)
        self.heard: list[str] = []
        self.grad: Tensor | None = None
        self._known = False

    def read(self, _: "Elsewhere") -> None:
        self.heard.append("read")
        if not self._known:
            with as_they_are(), torch.no_grad():
                self.proxy.copy_(TRUTH)
        self._known = True

    def touch(self, _: "Elsewhere") -> None:
        self.heard.append("touch")

    def done(self) -> None:
        """Nothing is to be freed."""

    def enter_graph(self, _: "Elsewhere") -> None:
        self.heard.append("enter")

    def gradient(self, _: "Elsewhere") -> Tensor | None:
        self.heard.append("gradient")
        return self.grad

    def assign_gradient(self, _: "Elsewhere", value: Tensor | None) -> None:
        self.heard.append("assign")
        self.grad = value


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda t: t + 1, TRUTH + 1),
        (lambda t: torch.cat([TRUTH, t]), TRUTH.repeat(2)),
        (lambda t: t.clone().mul_(2), TRUTH * 2),
        (lambda t: torch.tensor(t.tolist()), TRUTH),
        (lambda t: torch.from_numpy(t.numpy()), TRUTH),
    ],
)
def test_whoever_uses_its_numbers_has_those_of_the_other_rank(
    use: Callable[[Any], Tensor], expected: Tensor
) -> None:
    there = Elsewhere(requires_grad=False)
    assert torch.equal(use(there.proxy), expected)
    assert {*there.heard} == {"read"}  # and has changed nothing


def test_looks_ask_nobody() -> None:
    there = Elsewhere()
    weight = there.proxy
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.device, weight.is_cuda) == ((3,), torch.device("cpu"), False)
    assert weight.requires_grad_(False).is_leaf
    assert there.heard == []


def test_it_is_on_the_device_of_its_source_wherever_its_memory_waits() -> None:
    other = Elsewhere()
    other.device = torch.device("meta")
    weight = other.proxy
    assert (weight.device.type, weight.is_meta, weight.is_cpu) == ("meta", True, False)
    assert other.heard == []


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t.__setitem__(0, 5.0),
        lambda t: torch.add(torch.ones(3), 1, out=t),
        lambda t: t.data.mul_(2),
        lambda t: t.detach()[1:].zero_(),
        lambda t: setattr(t, "data", torch.ones(3)),
        lambda t: torch._foreach_mul_([torch.ones(2), t], 3.0),
    ],
)
@pytest.mark.parametrize("kind", [nn.Parameter, Tensor])
def test_a_change_in_place_is_told_when_it_has_happened(
    change: Callable[[Any], Any], kind: type
) -> None:
    there, here = Elsewhere(kind), TRUTH.clone()
    with torch.no_grad():
        change(here)
        change(there.proxy)
    assert there.heard.count("touch") == 1
    assert there.heard[-1] == "touch"
    assert torch.equal(there.proxy, here)


@pytest.mark.parametrize("training", [False, True])
def test_running_statistics_that_a_normalisation_writes_are_told(training: bool) -> None:
    mean, variance, weight = Elsewhere(Tensor), Elsewhere(Tensor), Elsewhere()
    x = torch.randn(4, 3)
    expected = [TRUTH.clone(), TRUTH.clone()]
    F.batch_norm(x, mean.proxy, variance.proxy, weight.proxy, training=training)
    F.batch_norm(x, expected[0], expected[1], TRUTH, training=training)
    assert torch.equal(mean.proxy, expected[0])
    assert torch.equal(variance.proxy, expected[1])
    assert "touch" in mean.heard
    assert "touch" in variance.heard
    assert "touch" not in weight.heard


def test_memory_that_it_shows_is_a_proxy_of_the_same_source_but_not_inside_of_a_graph() -> None:
    there = Elsewhere()
    for view in (there.proxy.data, there.proxy.detach(), there.proxy.detach()[1:].view(-1)):
        assert type(view) is RemoteTensor
        assert source_of(view) is there
    assert type(there.proxy.view(3, 1)) is Tensor
    assert source_of(there.proxy.detach() + 1) is None


def test_what_is_computed_of_it_with_gradients_is_in_a_graph() -> None:
    there, frozen = Elsewhere(), Elsewhere(requires_grad=False)
    with torch.no_grad():
        there.proxy.sum()
    (frozen.proxy * TRUTH).sum()
    there.proxy.detach().sum()
    assert "enter" not in there.heard + frozen.heard
    (there.proxy * frozen.proxy).sum().backward()
    assert "enter" in there.heard
    assert "enter" not in frozen.heard
    with as_they_are():
        assert torch.equal(there.proxy.grad, TRUTH)


def test_its_gradient_is_that_of_the_source() -> None:
    there = Elsewhere()
    assert there.proxy.grad is None
    there.proxy.grad = TRUTH
    assert there.proxy.grad is TRUTH
    assert there.grad is TRUTH
    del there.proxy.grad
    assert there.grad is None
    assert there.heard == ["gradient", "assign", "gradient", "assign"]


def test_hooks_on_parameters_of_other_ranks_are_refused_by_name() -> None:
    for method in ("register_hook", "register_post_accumulate_grad_hook"):
        with pytest.raises(HybridError, match=r"A hook was put on parameter 'net\.weight'"):
            getattr(Elsewhere().proxy, method)(lambda g: g)


@pytest.mark.parametrize("kind", [nn.Parameter, Tensor])
def test_made_plain_it_is_the_same_object_and_asks_nobody(kind: type) -> None:
    there = Elsewhere(kind)
    tensor = there.proxy
    assert type(tensor) is (RemoteParameter if kind is nn.Parameter else RemoteTensor)
    for _ in range(2):  # a tensor with several names is made plain for each
        make_plain(tensor)
        assert type(tensor) is kind
    assert tensor.sum() == 0
    assert source_of(tensor) is None
    assert there.heard == []


def test_a_value_read_now_asks_nobody_later() -> None:
    there = Elsewhere(Tensor)
    value = read_now(there.proxy)
    asked = [*there.heard]
    assert type(value) is Tensor
    assert torch.equal(value, TRUTH)
    assert there.heard == asked == ["read"]
    trained = Elsewhere()
    assert read_now(trained.proxy) is trained.proxy  # it is to get a gradient
    assert read_now(TRUTH) is TRUTH
