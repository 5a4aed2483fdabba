"""Cuts of least makespan or most profit (not of the fastest step: `planning.fastest_cuts`).

A dynamic programme solves the literal allocation problem (`knapsack.Problem`) for chains, exactly.
"""

import numpy as np

from lightning_hybrid.allocation.knapsack import Floats, Ints, Problem
from lightning_hybrid.errors import AllocationError


def cut_chain(problem: Problem) -> Ints:
    """Find an assignment of least cost in which the devices, in order, have consecutive partitions.

    It is a dynamic programme. `best[k]` is the least cost of the first k partitions on the devices
    so far; with one more device it becomes ::

        best[k] = min over i < k of  best[i] (+) run[i, k]

    where (+) is the maximum (makespan) or the sum (profit) and run[i, k] the cost of the run i ..
    k-1 on that device.

    Args:
        problem: The partitions and devices.

    Returns:
        For each partition its device, shape (n,).

    Raises:
        AllocationError: no assignment satisfies the limits.
    """
    combine = np.add if problem.objective == "profit" else np.maximum
    best = np.where(np.arange(problem.n + 1) == 0, 0.0, np.inf)
    starts = []  # for each device and end of its run, where the best such run starts
    for device in range(problem.m):
        reached = combine(best[:, None], _run_costs(problem, device))
        starts.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    if not np.isfinite(best[-1]):
        spare = problem.n > problem.m  # otherwise every assignment is contiguous
        raise AllocationError(
            "no contiguous assignment keeps every device within its limits: use larger devices or "
            "smaller partitions" + ", more devices, or contiguous=False" * spare
        )
    bounds = [problem.n]
    for start in reversed(starts):
        bounds.append(int(start[bounds[-1]]))
    return np.repeat(np.arange(problem.m), np.diff(bounds[::-1]))


def _run_costs(problem: Problem, device: int) -> Floats:
    """Cost of each run of consecutive partitions on a device, shape (n + 1, n + 1).

    Row i and column k stand for partitions i .. k - 1; the cost is infinite if the run is empty or
    exceeds a limit of the device.
    """

    def between(values: Floats) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(values)])
        return np.asarray(sums[None, :] - sums[:, None])

    cost = between(problem.loads) / problem.capacities[device]
    if problem.objective == "profit":
        cost = -cost
    else:
        edge = np.concatenate([[0.0], problem.cut_costs, [0.0]])  # no cuts at the network's ends
        cost += edge[:, None] + edge[None, :]
    possible = np.triu(np.ones_like(cost, dtype=bool), 1)  # runs must not be empty
    for weights, ceilings in zip(problem.weights, problem.ceilings):
        possible &= between(weights) <= ceilings[device]
    return np.where(possible, cost, np.inf)
