"""What ranks find out about messages and averages, in two threads of one process."""

from functools import partial
from typing import Any

import pytest
import torch
from ranks import gloo_groups, together

from lightning_hybrid.comm.connections import GroupHandle
from lightning_hybrid.process import device_survey, look_around

CPU = torch.device("cpu")
UNKNOWN = torch.device("cpu", 1)
"""A device with which :func:`look_around` was not called yet."""


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_survey, "_SEEN", {})


def look(*devices: torch.device) -> list[Any]:
    """What each of two ranks gets, with its device."""
    groups = map(GroupHandle, gloo_groups(60))
    pairs = zip(groups, devices)
    return together(*(partial(look_around, g, d, "gloo", (1.0, 0.5)) for g, d in pairs))


def test_two_ranks_know_what_a_step_takes_beside_computing() -> None:
    for machine in look(CPU, CPU):
        rates = machine.rates
        assert rates.ranks == 2
        assert rates.message_s > rates.reduce_s > 0
        assert rates.reduced_s(1e6, 2) > rates.reduce_s
        assert machine.cluster(1, 2).rates is rates
        assert machine.cluster(1, 2).capacities == (1.0, 0.5)


def test_a_rank_that_comes_later_gets_what_rank_0_has_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, _ = look(CPU, CPU)
    monkeypatch.setattr(device_survey, "_look_around", lambda *_: pytest.fail("measured twice"))
    assert look(CPU, UNKNOWN) == [first, first]


def test_a_rank_that_has_seen_more_than_rank_0_measures_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look(CPU, CPU)
    measured: list[int] = []

    def note(world: Any, *_: Any) -> int:
        measured.append(world.rank())
        return world.rank()

    monkeypatch.setattr(device_survey, "_look_around", note)
    look(UNKNOWN, CPU)
    assert sorted(measured) == [0, 1]
