"""A micro-batch draws the same numbers wherever its layers are."""

import gc
from itertools import product
from time import sleep

import pytest
import torch
from ranks import together

from lightning_hybrid.stage.random_numbers import (
    generators_of_microbatch,
    microbatch_seed,
    random_state,
    seed_number_of,
    set_random_state,
)

CPU = torch.device("cpu")


def test_stages_go_on_where_the_one_before_has_stopped() -> None:
    generator = torch.Generator().manual_seed(11)
    expected = [torch.randn(5, generator=generator) for _ in range(3)]
    state, found = None, []
    for stage in range(3):  # each on a rank whose own generator stands elsewhere
        torch.manual_seed(100 + stage)
        with generators_of_microbatch(None if stage else 11, CPU):
            if state is not None:
                set_random_state(state, CPU)
            found.append(torch.randn(5))
            state = random_state(CPU)
    assert all(map(torch.equal, found, expected))


def test_the_generator_of_the_users_code_goes_on_as_if_nothing_was_drawn() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)

    def run(*, fails: bool) -> None:
        with generators_of_microbatch(7, CPU):
            torch.rand(100)
            assert not fails

    run(fails=False)
    with pytest.raises(AssertionError):
        run(fails=True)
    assert torch.equal(torch.rand(4), expected)


def test_every_micro_batch_of_every_call_has_a_seed_of_its_own() -> None:
    places = [*product((0, 1, 11), (0, 1, 11), (0, 1, 1 << 16, 111), (0, 1, 11, 12))]
    seeds = {microbatch_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**64 for seed in seeds)
    torch.manual_seed(max(seeds))  # which takes 64 bits


def test_seeds_are_those_of_earlier_releases() -> None:
    """A run that is resumed draws what it would have drawn."""
    assert microbatch_seed(0, 0, 0, 0) == 11708687640548437744
    assert seed_number_of(batch=3, call=2) == 3 * 2**16 + 2


def test_calls_of_different_batches_have_different_numbers() -> None:
    numbers = {seed_number_of(batch, call) for batch in range(5) for call in (0, 1, 2**16 - 1)}
    assert len(numbers) == 15


class _Collected:
    """Garbage that lets another thread run when it is collected."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        sleep(0)


def test_ranks_that_are_threads_may_ask_for_the_state_at_the_same_time() -> None:
    def ask() -> None:
        for _ in range(1000):
            _Collected()
            random_state(CPU)

    thresholds = gc.get_threshold()
    gc.set_threshold(5)  # while torch makes the tensor, too
    try:
        together(ask, ask, ask)
    finally:
        gc.set_threshold(*thresholds)
