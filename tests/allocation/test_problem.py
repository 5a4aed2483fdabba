import doctest
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.allocation import Problem, allocate, knapsack
from lightning_hybrid.errors import AllocationError


def problem_of(loads: Any, capacities: Any, **more: Any) -> Problem:
    """A problem from lists of numbers."""
    return Problem(loads, capacities, **more)


def test_profit_is_equation_5_on_an_example_by_hand() -> None:
    problem = problem_of([1, 2, 3], [4, 8], objective="profit", contiguous=False)
    # c_ij = 1/4 1/8, 2/4 2/8, 3/4 3/8
    assert problem.values(np.array([[0, 0, 1], [1, 1, 0]])).tolist() == [9 / 8, 9 / 8]
    assert problem.values(np.array([[0, 1, 1]])).tolist() == [1 / 4 + 5 / 8]


def test_a_full_device_takes_no_more() -> None:
    problem = problem_of([1, 2, 3], [4, 8], objective="profit", contiguous=False)
    assert problem.feasible(np.array([[0, 1, 0], [1, 0, 0]])).tolist() == [True, False]


def test_an_empty_device_is_infeasible() -> None:
    problem = problem_of([1, 2, 3], [9, 9])
    assert problem.feasible(np.array([[0, 0, 0], [0, 0, 1]])).tolist() == [False, True]


def test_the_makespan_charges_a_cut_to_both_neighbours() -> None:
    problem = problem_of([1, 2, 3], [1, 2], cut_costs=[10, 0.5])
    assert problem.times(np.array([[0, 0, 1]])).tolist() == [[3.5, 2.0]]
    assert problem.times(np.array([[0, 1, 0]])).tolist() == [[14.5, 11.5]]


@given(st.lists(st.floats(0.1, 1), min_size=3, max_size=8), st.data())
def test_profit_is_constant_on_equal_devices(loads: list[float], data: Any) -> None:
    problem = problem_of(loads, [10.0] * 3, objective="profit", contiguous=False)
    labels = st.lists(st.integers(0, 2), min_size=len(loads), max_size=len(loads))
    values = problem.values(np.array([data.draw(labels), data.draw(labels)]))
    np.testing.assert_allclose(values, sum(loads) / 10)


def test_the_module_shows_what_is_wrong_with_profit() -> None:
    results = doctest.testmod(knapsack)
    assert results.attempted > 3
    assert results.failed == 0


def test_the_makespan_separates_placements_between_which_profit_ties() -> None:
    loads, capacities = [3, 1, 1, 1], [6, 6]
    lopsided, balanced = np.array([[0, 0, 0, 1]]), np.array([[0, 1, 1, 1]])
    profit = problem_of(loads, capacities, objective="profit")
    makespan = problem_of(loads, capacities)
    assert profit.values(lopsided) == profit.values(balanced)
    assert makespan.values(balanced) < makespan.values(lopsided)
    assert allocate(makespan).value == makespan.values(balanced)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loads": [1, 2]}, "2 partitions cannot give each of 3 devices one"),
        ({"loads": []}, "0 partitions"),
        ({"capacities": []}, "0 devices"),
        ({"loads": [1, -2, 3]}, r"loads\[1\] is -2.0"),
        ({"loads": [1, 2, nan]}, r"loads\[2\] is nan"),
        ({"capacities": [1, 0, 1]}, r"capacities\[1\] is 0.0: .* more than 0"),
        ({"capacities": [1, inf, 1]}, r"capacities\[1\] is inf"),
        ({"cut_costs": [1.0]}, r"cut_costs has shape \(1,\), 2 numbers are needed"),
        ({"memory": [1, 1, 1]}, "must be given together"),
        ({"objective": "speed"}, "'speed' is neither 'makespan' nor 'profit'"),
        ({"last_device": 3}, r"last_device\(3\) is none of the devices 0..2"),
        ({"last_device": 1}, r"last_device\(1\) is not the last of the devices 0..2"),
    ],
)
def test_wrong_numbers_are_refused_with_the_numbers(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(AllocationError, match=message):
        Problem(**({"loads": [1, 2, 3], "capacities": [4, 4, 4]} | arguments))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(AllocationError, match="'guess' is neither 'gabra' nor 'gabra-literal'"):
        allocate(problem_of([1, 2], [1]), "guess")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "limited",
    [
        {"memory": [2, 2, 2], "memory_limits": [3, 3]},
        {"memory": [9, 1, 1], "memory_limits": [4, 4]},  # one partition is too large
        {"memory": [3, 3, 3], "memory_limits": [2, 9]},  # or a device too small for any
        {"objective": "profit", "loads": [4, 4, 4], "capacities": [5, 5]},
    ],
)
@pytest.mark.parametrize("contiguous", [True, False])
def test_limits_that_no_placement_keeps_are_reported(
    limited: dict[str, Any], contiguous: bool
) -> None:
    values = {"loads": [1, 1, 1], "capacities": [1, 1]} | limited
    with pytest.raises(AllocationError, match="larger devices"):
        allocate(problem_of(**values, contiguous=contiguous))


def test_limits_hold_in_a_chain() -> None:
    found = allocate(problem_of([1] * 4, [1, 1], memory=[1] * 4, memory_limits=[1, 3]))
    assert found.assignment == (0, 1, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "limits", "hint"), [([3, 2], [2, 3], False), ([3, 3, 1, 1], [4, 4], True)]
)
def test_free_placements_are_suggested_only_where_there_are_more(
    sizes: list[float], limits: list[float], hint: bool
) -> None:
    with pytest.raises(AllocationError) as error:
        allocate(problem_of([1] * len(sizes), [1, 1], memory=sizes, memory_limits=limits))
    assert ("contiguous=False" in str(error.value)) == hint
