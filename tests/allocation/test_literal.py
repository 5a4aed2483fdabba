"""GABRA as it is printed, with what had to be added to run it."""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.allocation import Problem, allocate
from lightning_hybrid.allocation.gabra import GabraSettings
from lightning_hybrid.allocation.literal import literal_gabra, printed_children
from lightning_hybrid.errors import AllocationError


def instance(seed: int, n: int, m: int, objective: Any = "profit") -> Problem:
    rng = np.random.default_rng(seed)
    loads, capacities = rng.uniform(0.1, 1.0, n), rng.uniform(0.5, 1.0, m)
    if objective == "profit":
        capacities *= max(1.5 * loads.sum() / capacities.sum(), loads.max() / capacities.max())
    return Problem(loads, capacities, objective=objective, contiguous=False)


def literal(loads: Any, capacities: Any, **kwargs: Any) -> Any:
    arguments: dict[str, Any] = {"objective": "profit", "contiguous": False} | kwargs
    seed = arguments.pop("seed", 0)
    return allocate(Problem(loads, capacities, **arguments), "gabra-literal", seed)


def test_the_profit_is_equation_5_and_the_capacities_hold() -> None:
    found = literal([1, 2, 3, 2], [4, 8])
    profit = sum(p / (4, 8)[j] for p, j in zip([1, 2, 3, 2], found.assignment))
    assert found.value == pytest.approx(profit)
    loads = [sum(p for p, k in zip([1, 2, 3, 2], found.assignment) if k == j) for j in (0, 1)]
    assert loads == [4, 4]  # the most of what counts more fits exactly


@pytest.mark.conformance
def test_it_finds_most_of_the_optima_of_small_problems() -> None:
    hits = 0
    for seed in range(20):
        problem = instance(seed, 6, 2)
        every = np.array(list(product(range(2), repeat=6)))
        cost = literal_gabra(problem, seed)[1][-1]
        hits += cost == pytest.approx(problem.costs(every).min(), rel=1e-9)
    assert hits >= 17


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from(["profit", "makespan"]), st.integers(2, 9))
def test_the_best_value_never_gets_worse_and_is_feasible(seed: int, objective: Any, n: int) -> None:
    try:
        problem = instance(seed, n, 2, objective)
    except AllocationError:
        return  # a partition too large for the devices: said before anything is searched
    try:
        found, history = literal_gabra(problem, seed, GabraSettings(population=8, generations=30))
    except AllocationError:
        every = np.array(list(product(range(2), repeat=n)))
        assert not np.isfinite(problem.costs(every)).any()
        return
    assert problem.feasible(found[None])[0]
    assert all(after <= before for before, after in pairwise(history))


def test_every_assignment_is_optimal_on_equal_devices_so_it_stops_at_once() -> None:
    assert len(literal([1, 2, 3, 4], [9, 9]).history) == 1


def test_few_possible_children_do_not_make_it_loop_for_ever() -> None:
    assert sorted(literal([1, 1], [1, 2], objective="makespan").assignment) == [0, 1]


def test_dead_ends_of_the_initial_placement_are_left() -> None:
    # the heavy partitions come last: placed in order, they seldom find room
    found = literal([1, 1, 1, 1, 6, 6], [8, 8])
    assert found.assignment[4] != found.assignment[5]


def test_the_second_child_as_printed_has_its_halves_exchanged() -> None:
    left, right = np.array([0, 1, 2, 3, 4]), np.array([5, 6, 7, 8, 9])
    first, second = printed_children(left, right)
    assert first.tolist() == [0, 1, 7, 8, 9]
    assert second.tolist() == [2, 3, 4, 5, 6]


def test_the_same_seed_gives_the_same_allocation() -> None:
    loads = np.random.default_rng(3).uniform(0.1, 1.0, 12).tolist()
    assert literal(loads, [3, 9], seed=5) == literal(loads, [3, 9], seed=5)


def test_it_is_refused_for_chains() -> None:
    with pytest.raises(AllocationError, match="contiguous=False"):
        literal([1, 1, 1], [9, 9], contiguous=True)
