"""Replicas that go back inside of their calls average there, if that is known to be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driven import let_go
from in_memory import MemoryGroup, MemoryGroupOfRank
from losses_inside import Cut, Net, batch, compare, whole
from torch import Tensor, nn

from lightning_hybrid.driver.inside_call import why_not_inside
from lightning_hybrid.stage.gradient_averaging import AveragingGroup

Groups = dict[Any, MemoryGroup]


class Largest(MemoryGroupOfRank):
    """A group that looks for the largest numbers."""

    def allreduce(self, tensors: list[Tensor], *_: Any) -> Any:
        [tensor] = tensors
        return self._begin(
            tensors,
            lambda all_parts: tensor.copy_(torch.stack([p[0] for p in all_parts]).amax(0)),
        )


class Twin(Cut):
    """One of two replicas of two stages.

    Args:
        net: the network.
        number: of the replica.
        groups: of the ranks of both.
        options: of `Cut`.
    """

    def __init__(self, net: nn.Module, number: int, groups: Groups, **options: Any) -> None:
        self._number, self._shared = number, groups
        super().__init__(net, 2, "1f1b", **options)

    def mesh(self, rank: int) -> Any:
        mesh = super().mesh(rank)
        both = self._shared.setdefault(rank, MemoryGroup(2))
        # (one that does not block: the calls of the two replicas run one after the other)
        mesh.owners = lambda _: MemoryGroupOfRank(both, self._number)
        mesh.drivers = Largest(self._shared.setdefault("drivers", MemoryGroup(2)), self._number)
        return mesh


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two replicas, and the calls of which ranks have taken the averages of."""
    taken: list[int | None] = []
    take = AveragingGroup.take_aside

    def noted(group: AveragingGroup) -> Any:
        taken.append(group.aside_of)
        return take(group)

    monkeypatch.setattr(AveragingGroup, "take_aside", noted)
    groups: Groups = {}
    options = getattr(request, "param", {})
    both = [Twin(Net(), number, groups, **options) for number in range(2)]
    found = SimpleNamespace(both=both, taken=taken)
    step(found, (1.0, 1.0))  # (in the first step the user's code may have computed with weights)
    assert taken == []
    yield found
    for replica in both:
        let_go(replica)


def together(twins: Any, run: Callable[[int, Twin], object]) -> None:
    """Run something in both replicas, at once."""
    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(run, n, replica) for n, replica in enumerate(twins.both)]:
            result.result(60)


def step(twins: Any, factors: tuple[float, float], rows: tuple[int, int] = (8, 8)) -> None:
    losses = []
    for number, replica in enumerate(twins.both):
        replica.clear()
        replica.begin()
        x, y = batch(number)
        losses.append(replica(x[-rows[number] :], y[-rows[number] :])["loss"])
    together(twins, lambda n, replica: replica.backward(losses[n] * factors[n]))


def expected(factors: tuple[float, float], rows: tuple[int, int] = (8, 8)) -> dict[str, Tensor]:
    of_each = []
    for number, (factor, count) in enumerate(zip(factors, rows)):
        x, y = batch(number)
        of_each.append(whole(Net(), (x[-count:], y[-count:]), factor=factor))
    return {name: (one + of_each[1][name]) / 2 for name, one in of_each[0].items()}


def check(twins: Any, gradients: dict[str, Tensor]) -> None:
    for replica in twins.both:
        assert why_not_inside(replica.network, replica.network._graphs[0]) == ""
        compare(replica.gradients(), gradients, 1e-10)


@pytest.mark.parametrize(
    ("factors", "ranks"), [((1.0, 1.0), 4), ((0.3, 0.3), 4), ((0.5, 2.0), 0), ((1.0, 0.0), 0)]
)
def test_averages_are_taken_where_all_losses_get_one_factor(
    twins: Any, factors: tuple[float, float], ranks: int
) -> None:
    step(twins, factors)
    check(twins, expected(factors))
    assert len(twins.taken) == ranks


@pytest.mark.parametrize("twins", [{"rounds": 2}, {"split": [1]}], indirect=True)
def test_so_they_are_in_loops_and_with_split_backwards(twins: Any) -> None:
    for factors in ((1.0, 1.0), (0.5, 2.0)):
        step(twins, factors)
        check(twins, expected(factors))
    assert len(twins.taken) == 4


def test_each_replica_may_expect_another_factor(twins: Any) -> None:
    for _ in range(2):
        step(twins, (0.5, 3.0))
    check(twins, expected((0.5, 3.0)))
    assert len(twins.taken) == 4  # in the second step each has the one that it expected


def test_a_batch_of_one_sample_beside_others_is_averaged_afterwards(twins: Any) -> None:
    for rows, ranks in (((8, 8), 4), ((8, 1), 4), ((8, 8), 8)):
        step(twins, (1.0, 1.0), rows)
        check(twins, expected((1.0, 1.0), rows))
        assert len(twins.taken) == ranks


def test_calls_without_a_backward_and_further_calls_leave_averages_right(twins: Any) -> None:
    for replica in twins.both:  # (no backward follows)
        replica.begin()
        replica(*batch(5))
    step(twins, (1.0, 1.0))
    check(twins, expected((1.0, 1.0)))
    losses = []
    for number, replica in enumerate(twins.both):
        replica.clear()
        replica.begin()
        losses.append([replica(*batch(number))["loss"] for _ in range(2)])
    together(twins, lambda n, replica: replica.backward(losses[n][0] + losses[n][1]))
    check(twins, expected((2.0, 2.0)))
    assert len(twins.taken) == 4


def test_gradients_of_batches_that_accumulate_are_averaged_at_the_end(twins: Any) -> None:
    for replica in twins.both:
        replica.clear()
    for last in (False, True):
        losses = []
        for number, replica in enumerate(twins.both):
            replica.begin()
            replica.driver.gradients.synchronize = last
            losses.append(replica(*batch(number))["loss"] / 2)
        together(twins, lambda n, replica, losses=losses: replica.backward(losses[n]))
    check(twins, expected((1.0, 1.0)))
    assert twins.taken == []
