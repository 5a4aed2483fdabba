"""A network is planned and cut at its first call, and again where another graph needs it."""

from typing import Any

import pytest
import torch
from adopted import Driven
from driven import batches
from torch import Tensor, nn

from lightning_hybrid.errors import NetworkError, PlanError
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.profiling.called_network import CalledNetwork


class Chooses(nn.Module):
    """Goes one of two ways, as an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        self.double = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if self.double:
            x = 2 * x
        return self.third(self.second(x).tanh())


class Centers(Chooses):
    """Looks at the batch as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.third(self.second(h - h.mean(0)).tanh())


class Reverses(Chooses):
    """Calls its layers in another order, where it is to."""

    def forward(self, x: Tensor) -> Tensor:
        if self.double:
            return self.first(self.second(self.third(x)))
        return super().forward(x)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_call_is_computed_by_the_stages_that_it_was_cut_into(
    ranks: Any, workers: int
) -> None:
    driven = Driven(ranks, Chooses(), workers)
    for value in batches(2):
        driven.assert_same(value)
    assert driven.plans["net"].microbatches == 2
    layers = ("first", "second")[:workers]
    assert driven.remote == {f"net.{n}.{kind}" for n in layers for kind in ("weight", "bias")}
    driven.discovery.require()


def _swap(net: Chooses) -> None:
    net.first, net.second = net.second, net.first


def _wrap(net: Chooses) -> None:
    net.second = nn.Sequential(net.second)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (_swap, "what was 'second.weight' .* is 'first.weight' now"),
        (_wrap, "what was 'second.weight' .* is 'second.0.weight' now"),
    ],
)
def test_layers_that_change_places_after_the_cut_are_refused(
    ranks: Any, move: Any, words: str
) -> None:
    """Layers that change places, or are wrapped, after the network was cut."""
    driven = Driven(ranks, Chooses())
    value = batches(1)[0]
    driven.assert_same(value)
    move(driven.module.net)
    with pytest.raises(NetworkError, match=words):
        driven.module.net(value)


def test_a_plan_of_an_earlier_run_is_made_anew_where_the_network_has_other_layers(
    ranks: Any,
) -> None:
    driven = Driven(ranks, Chooses())
    driven.plans["net"] = Plan(
        replicas=1, stages=2, microbatches=2, schedule="gpipe", cuts=("fourth",)
    )
    driven.assert_same(batches(1)[0])
    assert driven.plans["net"].cuts == ("second",)


def test_another_graph_of_a_network_is_cut_at_the_same_places(ranks: Any) -> None:
    driven, (first, second) = Driven(ranks, Chooses()), batches(2)
    driven.assert_same(first)
    before = driven.remote
    for network in (driven.module.net, driven.reference):
        network.double = True
    driven.assert_same(second)
    assert driven.remote == before
    assert list(driven.plans) == ["net"]
    assert "was captured again" in driven.lines[-1]
    with torch.no_grad():
        value = first[:3]
        torch.testing.assert_close(driven.module.net(value), driven.reference(value))


def test_a_network_that_looks_at_the_batch_gets_it_whole(ranks: Any) -> None:
    driven = Driven(ranks, Centers())
    driven.assert_same(batches(1)[0])
    assert driven.plans["net"].microbatches == 1
    assert "takes each batch whole (num_microbatches=1)" in driven.lines[0]


def test_a_graph_that_needs_weights_in_other_places_runs_on_the_driver(ranks: Any) -> None:
    driven, (first, second) = Driven(ranks, Reverses(), 2), batches(2)
    driven.assert_same(first)
    for network in (driven.module.net, driven.reference):
        network.double = True
    torch.testing.assert_close(driven.module.net(second), driven.reference(second))
    assert "runs on the driver in some calls" in driven.lines[-1]


def test_a_plan_from_an_earlier_run_is_used(ranks: Any) -> None:
    driven = Driven(ranks, Chooses())
    driven.plans["net"] = Plan(
        replicas=1, stages=2, microbatches=4, schedule="gpipe", cuts=("third",)
    )
    driven.assert_same(batches(1)[0])
    assert driven.lines == []  # it was told when it was made
    assert "net.second.weight" in driven.remote


def test_a_plan_for_backwards_inside_of_calls_that_cannot_be_there_is_told_so(ranks: Any) -> None:
    """As where `auto` has chosen it in an earlier run, of which the plan is."""
    driven = Driven(ranks, Chooses())
    driven.plans["net"] = Plan(
        replicas=1, stages=2, microbatches=2, schedule="1f1b", cuts=("third",)
    )
    for value in batches(2):
        driven.assert_same(value)
    [line] = driven.lines
    assert "as under schedule='gpipe', since it returns no loss" in line


class Measures(Chooses):
    """Returns a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize(
    ("network", "options", "tried"),
    [
        (Measures, {"microbatches": None, "shares": True}, [2, 4]),
        (Measures, {"microbatches": None}, [2]),
        (Measures, {"shares": True}, [2]),
        (Chooses, {"microbatches": None, "shares": True}, [2]),
    ],
)
def test_smaller_micro_batches_are_tried_where_nothing_fits_and_fewer_would_be_alive(
    ranks: Any, network: type[Chooses], options: dict[str, Any], tried: list[int]
) -> None:
    seen: list[int] = []

    def tight(called: CalledNetwork, microbatches: int, *rest: Any) -> Plan:
        seen.append(microbatches)
        assert called.leaves[0].shape[0] == 4 // microbatches
        if microbatches == 2:
            raise PlanError("no chain of stages fits into memory")
        return driven.plan(called, microbatches, *rest)

    driven = Driven(ranks, network(), planner=tight, **options)
    if tried == [2]:
        with pytest.raises(PlanError, match="no chain"):
            driven.module.net(batches(1)[0])
    else:
        driven.assert_same(batches(1)[0])
    assert seen == tried


def test_fewer_partitions_than_stages_are_refused_with_their_number(ranks: Any) -> None:
    driven = Driven(ranks, Chooses(), 3)
    with pytest.raises(
        PlanError, match=r"3 network partitions, fewer than pipeline.*=4\. Use at m"
    ):
        driven.module.net(batches(1)[0])


def test_an_error_in_the_first_run_of_a_stage_names_the_network(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr("lightning_hybrid.driver.adoption.check", fail)
    driven = Driven(ranks, Chooses())
    with pytest.raises(NetworkError, match=r"Network 'net' \(Chooses\) was captured, but.*on purp"):
        driven.module.net(batches(1)[0])
