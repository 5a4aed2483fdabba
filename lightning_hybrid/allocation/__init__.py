"""Allocate partitions to devices: the knapsack problem, GABRA, and exact solvers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hybrid.allocation.evolution import Breeding, evolve
from lightning_hybrid.allocation.exact import solve_exactly
from lightning_hybrid.allocation.gabra import gabra
from lightning_hybrid.allocation.knapsack import (
    SLACK,
    Floats,
    Ints,
    Numbers,
    Objective,
    make_problem,
)
from lightning_hybrid.allocation.literal import literal_gabra
from lightning_hybrid.allocation.merging import merge
from lightning_hybrid.errors import AllocationError

__all__ = ["SLACK", "Breeding", "Floats", "Ints", "allocate", "evolve", "merge"]


@dataclass(frozen=True)
class Allocation:
    """A placement of the partitions.

    Attributes:
        assignment: for each partition the index of its device.
        value: the objective: the makespan (smaller is better) or the profit z of Eq. 5 (larger is).
        history: best value after each generation, the initial population first; one entry for an
            exact solver.
    """

    assignment: tuple[int, ...]
    value: float
    history: tuple[float, ...]


def allocate(
    loads: Numbers,
    capacities: Numbers,
    *,
    cut_costs: Numbers | None = None,
    memory: Numbers | None = None,
    memory_limits: Numbers | None = None,
    method: Literal["gabra", "gabra-literal", "exact"] = "gabra",
    objective: Objective = "makespan",
    contiguous: bool = True,
    last_device: int | None = None,
    device_order: Sequence[int] | None = None,
    seed: int = 0,
) -> Allocation:
    """Place n network partitions on m devices, at least one on each.

    Args:
        loads: n computation loads, in seconds or FLOPs.
        capacities: m relative speeds (`makespan`), or the loads that the devices may carry
            (`profit`).
        cut_costs: n - 1 costs of cutting after partition i, charged to the devices on both sides,
            in the unit of load / capacity. They do not count in `profit` (Eq. 5).
        memory: n sizes of the partitions; to be given with `memory_limits`.
        memory_limits: m sizes that the devices may hold, hard limits.
        method: `gabra`, the genetic algorithm; `exact`; or `gabra-literal`, the paper's algorithm
            as it is printed (see `literal` for additions), for free placements only.
        objective: `makespan`, the time of the slowest device, or `profit`, the paper's Eq. 5; see
            `knapsack` for the difference.
        contiguous: Whether each device gets consecutive partitions, the devices in any order.
        last_device: Device that must hold the last partition, as the driver does; None: any.
        device_order: The devices in the order of the chain, if it is given; None: any.
        seed: Seed of the genetic algorithm; the same seed gives the same result.

    Raises:
        AllocationError: the numbers are wrong (negative, not finite, of unequal count), there are
            more devices than partitions, or no placement within the limits was found.

    Reference: Akintoye et al., IEEE Access 10:77950, 2022 (Eqs. 3-9, Algorithms 1-3).
    """
    problem = make_problem(
        loads,
        capacities,
        cut_costs=cut_costs,
        memory=memory,
        memory_limits=memory_limits,
        objective=objective,
        contiguous=contiguous,
        last_device=last_device,
        device_order=device_order,
    )
    if method == "exact":
        assignment = solve_exactly(problem)
        costs: tuple[float, ...] = (float(problem.costs(assignment[None])[0]),)
    elif method == "gabra":
        assignment, costs = gabra(problem, seed)
    elif method == "gabra-literal":
        assignment, costs = literal_gabra(problem, seed)
    else:
        raise AllocationError(f"method {method!r} is none of 'gabra', 'gabra-literal', 'exact'")
    values = tuple(-cost if objective == "profit" else cost for cost in costs)
    return Allocation(tuple(assignment.tolist()), values[-1], values)
