"""Allocate partitions to devices: by a genetic algorithm (GABRA), or for chains by an exact one."""

from dataclasses import dataclass
from typing import Literal

from lightning_hybrid.allocation.black_box_gabra import Breeding, evolve
from lightning_hybrid.allocation.exact_makespan import cut_chain
from lightning_hybrid.allocation.gabra import gabra
from lightning_hybrid.allocation.knapsack import SLACK, Floats, Ints, Problem
from lightning_hybrid.allocation.literal import literal_gabra
from lightning_hybrid.allocation.merging import merge
from lightning_hybrid.errors import AllocationError

__all__ = ["SLACK", "Breeding", "Floats", "Ints", "Problem", "allocate", "evolve", "merge"]


@dataclass(frozen=True)
class Allocation:
    """A placement of the partitions on devices, and its value.

    Attributes:
        assignment: for each partition the index of its device.
        value: the objective: the makespan (smaller is better) or the profit z of Eq. 5 (larger is
            better).
        history: best value after each generation, the value of the initial population first; a
            single entry if a chain was cut by dynamic programming.
    """

    assignment: tuple[int, ...]
    value: float
    history: tuple[float, ...]


def allocate(
    problem: Problem, method: Literal["gabra", "gabra-literal"] = "gabra", seed: int = 0
) -> Allocation:
    """Place network partitions on devices.

    If `problem.contiguous`, the best chain is found by dynamic programming; if not, a genetic
    algorithm searches for a good placement.

    Args:
        problem: The partitions and devices.
        method: Search for free placements: `gabra`, the genetic algorithm with improvements, or
            `gabra-literal`, the paper's algorithm as it is printed (see `literal` for additions).
        seed: Seed of the genetic algorithm; the same seed gives the same result.

    Returns:
        The best placement that was found.

    Raises:
        AllocationError: no placement within the limits was found, the method is unknown, or
            `gabra-literal` is asked for a chain.

    Reference: Akintoye et al., IEEE Access 10:77950, 2022 (Eqs. 3-9, Algorithms 1-3).
    """
    if method not in ("gabra", "gabra-literal"):
        raise AllocationError(f"method {method!r} is neither 'gabra' nor 'gabra-literal'")
    if method == "gabra-literal":
        assignment, costs = literal_gabra(problem, seed)
    elif problem.contiguous:
        assignment = cut_chain(problem)
        costs = (float(problem.costs(assignment[None])[0]),)
    else:
        assignment, costs = gabra(problem, seed)
    values = tuple(-cost if problem.objective == "profit" else cost for cost in costs)
    return Allocation(tuple(assignment.tolist()), values[-1], values)
