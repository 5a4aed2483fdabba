"""``optimizer.state`` on the driver, of parameters that another rank steps."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_hybrid.state.optimizer_state import FetchedStates

HERE, THERE = Parameter(torch.ones(1)), Parameter(torch.ones(2))


class World:
    """A mapping, and how often it has asked the other rank."""

    def __init__(self) -> None:
        self.asked = 0
        self.state = FetchedStates({HERE: {"k": 1}}, self.fetch)

    def fetch(self, here: dict[Parameter, dict[str, Any]]) -> dict[Parameter, dict[str, Any]]:
        self.asked += 1
        return {THERE: {"k": 2}, **here}


@pytest.mark.parametrize(
    "look",
    [
        lambda s: s[THERE]["k"] == 2,
        lambda s: THERE in s,
        lambda s: s.get(THERE) == {"k": 2},
        lambda s: len(s) == 2,
        lambda s: [part["k"] for part in s.values()] == [2, 1],
        lambda s: dict(s.items())[THERE] == {"k": 2},
        lambda s: list(s) == [THERE, HERE],
        lambda s: list(copy.deepcopy(s).values()) == [{"k": 2}, {"k": 1}],
        lambda s: s.pop(THERE) == {"k": 2},
    ],
)
def test_every_look_finds_the_states_of_the_other_rank(look: Callable[[Any], bool]) -> None:
    world = World()
    assert look(world.state)
    assert look(World().state)
    assert world.asked == 1
    assert not world.state.away


def test_a_step_sees_what_this_rank_has_and_asks_nobody() -> None:
    world = World()
    with world.state.quietly():
        assert THERE not in world.state
        world.state[HERE]["k"] += 1
    assert world.asked == 0
    assert world.state.own() == defaultdict(dict, {HERE: {"k": 2}})
    assert world.state.away


def test_what_is_cleared_is_cleared_everywhere() -> None:
    world = World()
    world.state.clear()
    assert not world.state
    assert world.asked == 1
    assert not world.state.away
