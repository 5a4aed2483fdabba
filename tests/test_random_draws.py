"""Early batches and steps that draw from one generator are refused; all else is as in order."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.random_draws import Draws

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "NumPy": lambda: np.random.rand(1),
    "random": random.random,
}


def fetch(draws: Draws, draw: Callable[[], object] = int) -> None:
    with draws.early():
        draw()


@pytest.mark.parametrize("name", DRAWS)
def test_draws_before_and_after_an_early_fetch_that_draws_are_refused(name: str) -> None:
    draw = DRAWS[name]
    before, after = Draws(), Draws()
    before.begin()
    draw()
    with pytest.raises(NetworkError, match=rf"draws from .*{name}.*num_workers=1"):
        fetch(before, draw)
    after.begin()
    fetch(after, draw)
    draw()
    with pytest.raises(NetworkError, match=name):
        after.look()


@pytest.mark.parametrize(
    ("own", "draw"),
    [
        (torch.Generator(), lambda own: torch.rand(1, generator=own)),
        (np.random.default_rng(0), lambda own: own.random()),
        (np.random.RandomState(0), lambda own: own.rand()),
        (random.Random(0), lambda own: own.random()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_generators_of_the_users_own_are_looked_at_too(own: Any, draw: Any) -> None:
    draws = Draws()
    draws.know({"the generator M.own": own})
    draws.begin()
    fetch(draws, lambda: draw(own))
    draws.look()
    draw(own)
    with pytest.raises(NetworkError, match=r"draws from the generator M\.own, as"):
        draws.look()


def test_either_alone_may_draw() -> None:
    draws = Draws()
    draws.begin()
    for _ in range(3):
        fetch(draws, DRAWS["torch"])
        draws.look()
    draws = Draws()
    draws.begin()
    for _ in range(3):
        fetch(draws)
        DRAWS["torch"]()
        draws.look()


def test_different_generators_do_not_disturb_each_other() -> None:
    draws = Draws()
    draws.begin()
    for _ in range(3):
        fetch(draws, DRAWS["NumPy"])
        DRAWS["torch"]()
        draws.look()


def test_a_batch_that_is_fetched_in_its_turn_may_draw() -> None:
    draws = Draws()
    for _ in range(3):
        DRAWS["torch"]()  # its fetch
        draws.begin()
        fetch(draws)
        DRAWS["torch"]()  # a step
        draws.look()
