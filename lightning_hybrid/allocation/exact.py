"""Exact solvers, for `method="exact"` and as a reference for GABRA.

Contiguous problems are solved by dynamic programming over the chain, free ones as integer programs
by HiGHS.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, csr_array, eye_array, hstack, kron

from lightning_hybrid.allocation.knapsack import Floats, Ints, Problem
from lightning_hybrid.errors import AllocationError

_MAX_OPERATIONS = 2e10
"""Most elementary steps of the dynamic programme, which take about a minute."""
_TIME_LIMIT_S = 60.0
_INFEASIBLE = 2  # status of scipy's milp


def solve_exactly(problem: Problem) -> Ints:
    """Find an assignment of least cost, shape (n,).

    Raises:
        AllocationError: no assignment satisfies the limits, or the search would take too long.
    """
    return _chain(problem) if problem.contiguous else _highs(problem)


def _chain(problem: Problem) -> Ints:
    """Solve a contiguous problem by dynamic programming over (devices used, partitions done).

    Equal devices are interchangeable, so a state counts the used devices of each class: m + 1
    states when all are equal or their order is given, 2^m when all differ. `best[state][i]` is the
    least cost of running the first i partitions on the devices of the state, and ::

        best[state][k] = min over class c, i < k of  best[state - c][i] (+) run_c[i, k]

    where (+) is the maximum (makespan) or the sum (profit) and run_c[i, k] the cost of the run
    i .. k-1 on a device of class c. `last_device`, if it is given, is a class by itself, which is
    taken in the last step only.
    """
    counts, order = Counter(problem.classes), problem.order
    classes, totals = list(counts), list(counts.values())
    combine = np.add if problem.objective == "profit" else np.maximum
    start = np.where(np.arange(problem.n + 1) == 0, 0.0, np.inf)
    full = tuple(totals)
    # each state comes after those with fewer devices: `product` counts up
    if order is None:
        _check_size(problem, totals)
        states: Iterable[tuple[int, ...]] = product(*(range(total + 1) for total in totals))
    else:
        used = [order[:count] for count in range(problem.m + 1)]
        states = [tuple(int(device in devices) for device in classes) for devices in used]
    runs = [_run_costs(problem, device) for device in classes]

    def may_be_last(state: tuple[int, ...], device: int) -> bool:
        if order is not None:
            return device == order[sum(state) - 1]
        ending = problem.last_device is not None and state == full
        return (device == problem.last_device) == ending

    def usable(state: tuple[int, ...]) -> list[tuple[int, Floats, Floats]]:
        """The classes that may be last in a state: class, costs before it, costs of its runs."""
        return [
            (c, best[_without(state, c)], run)
            for c, (device, run) in enumerate(zip(classes, runs))
            if state[c] and may_be_last(state, device)
        ]

    best: dict[tuple[int, ...], Floats] = {}
    for state in states:
        reached = [combine(before[:, None], run).min(axis=0) for _, before, run in usable(state)]
        nothing = start if not any(state) else np.full_like(start, np.inf)
        best[state] = np.min([nothing, *reached], axis=0)
    state, k = full, problem.n
    if not np.isfinite(best[state][k]):
        spare = problem.n > problem.m  # otherwise every assignment is contiguous
        raise AllocationError(
            "no contiguous assignment keeps every device within its limits: use larger devices or "
            "smaller partitions" + ", more devices, or contiguous=False" * spare
        )
    # go back from the end: find the last run of the best cost
    free = [[j for j, c in enumerate(problem.classes) if c == device] for device in classes]
    assignment = np.empty(problem.n, dtype=np.int64)
    while k:
        last_runs = [(c, combine(before, run[:, k])) for c, before, run in usable(state)]
        c, costs = min(last_runs, key=lambda last: last[1].min())
        i = int(costs.argmin())
        assignment[i:k] = free[c].pop()
        state, k = _without(state, c), i
    return assignment


def _without(state: tuple[int, ...], c: int) -> tuple[int, ...]:
    return (*state[:c], state[c] - 1, *state[c + 1 :])


def _check_size(problem: Problem, totals: list[int]) -> None:
    states = prod(total + 1 for total in totals)
    operations = states * len(totals) * (problem.n + 1) ** 2
    if operations > _MAX_OPERATIONS:
        raise AllocationError(
            f"{problem.n} partitions on {problem.m} devices of {len(totals)} kinds take "
            f"{operations:.1g} steps exactly, more than {_MAX_OPERATIONS:.0g}: use method='gabra'"
        )


def _run_costs(problem: Problem, device: int) -> Floats:
    """Cost of each run of partitions i .. k-1 on a device, or infinity; shape (n + 1, n + 1)."""

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


def _highs(problem: Problem) -> Ints:
    """Solve a problem with free assignments by HiGHS.

    HiGHS tolerates violations of constraints of about 1e-6. If a device holds too much then, a
    constraint is added that these partitions are not on it together (a cover inequality), which
    cannot be violated by so little, and the problem is solved again.
    """
    covers: list[csr_array] = []
    while True:
        assignment = _optimum(problem, covers)
        found = _overfull(problem, assignment)
        if not found:
            return assignment
        covers += found


def _overfull(problem: Problem, assignment: Ints) -> list[csr_array]:
    """For each device beyond its limit, a row over x that counts the partitions on it."""
    rows = []
    for weights, ceilings in zip(problem.weights, problem.ceilings):
        held = np.bincount(assignment, weights, problem.m)
        for device in np.flatnonzero(held > ceilings):
            there = np.zeros((problem.n, problem.m))
            there[assignment == device, device] = 1.0
            rows.append(csr_array(there.reshape(1, -1)))
    return rows


def _optimum(problem: Problem, covers: Sequence[csr_array]) -> Ints:
    """Solve the mixed-integer model in x_ij of Eq. 4.

    For the makespan there are also variables y_ij, whether a cut beside device j is after partition
    i, and the makespan T. ``covers`` are rows over x of partitions that must not be on a device
    together.
    """
    n, m = problem.n, problem.m
    x = eye_array(n * m, format="csr")  # x_ij is variable i * m + j

    def per_device(weights: Floats) -> csr_array:
        return csr_array(kron(weights[None, :], eye_array(m)))

    each_once = kron(eye_array(n), np.ones((1, m)))
    rows = [(each_once, 1.0, 1.0), (per_device(np.ones(n)), 1.0, np.inf)]
    rows += [(per_device(w), -np.inf, top) for w, top in zip(problem.weights, problem.limits)]
    rows += [(cover, -np.inf, cover.sum() - 1) for cover in covers]
    constraints = [LinearConstraint(_padded(problem, a), low, high) for a, low, high in rows]
    if problem.objective == "profit":
        cost = -(problem.loads[:, None] / problem.capacities).ravel()
    else:
        cost = np.zeros(_variables(problem))
        cost[-1] = 1.0
        constraints += _makespan_rows(problem, x, per_device(problem.loads))
    integral = np.zeros(len(cost))
    integral[: n * m] = 1
    answer = milp(
        cost,
        integrality=integral,
        bounds=_bounds(problem),
        constraints=constraints,
        # without presolve, with which it reports an answer as optimal that is 0.2 or 0.5 % worse,
        # in 2 of 1,206 small problems (scipy 1.17.1)
        options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": 1e-9, "presolve": False},
    )
    if answer.status == _INFEASIBLE:
        raise AllocationError(
            f"no assignment of {n} partitions to {m} devices keeps every device within its limits: "
            "use more or larger devices, or smaller partitions"
        )
    if answer.status != 0:
        raise AllocationError(
            f"no proven optimum for {n} partitions on {m} devices within {_TIME_LIMIT_S:.0f} s: "
            f"use method='gabra'. (HiGHS: {answer.message})"
        )
    return np.asarray(answer.x[: n * m].reshape(n, m).argmax(axis=1), dtype=np.int64)


def _bounds(problem: Problem) -> Bounds:
    """Bounds of the variables: x_ij and y_ij between 0 and 1, T from 0; `last_device` is fixed."""
    n, m, variables = problem.n, problem.m, _variables(problem)
    lower, upper = np.zeros(variables), np.ones(variables)
    if problem.last_device is not None:
        lower[(n - 1) * m + problem.last_device] = 1
    if problem.objective == "makespan":
        upper[-1] = np.inf
    return Bounds(lower, upper)


def _variables(problem: Problem) -> int:
    x = problem.n * problem.m
    return x if problem.objective == "profit" else x + (problem.n - 1) * problem.m + 1


def _padded(problem: Problem, rows: csr_array) -> csr_array:
    """Rows over x, padded with zeros for the other variables."""
    rest = _variables(problem) - rows.shape[1]
    return rows if not rest else hstack([rows, csr_array((rows.shape[0], rest))], format="csr")


def _makespan_rows(problem: Problem, x: csr_array, loads: csr_array) -> list[LinearConstraint]:
    """Constraints that T is at least the time of each device, with its cuts."""
    m, cuts = problem.m, (problem.n - 1) * problem.m
    # y >= |x_i - x_(i+1)| is enough: larger values of y would only increase T
    y = eye_array(cuts, format="csr")
    here, after = x[:cuts], x[m:]
    none = csr_array((cuts, 1))
    compute = csr_array(loads / problem.capacities[:, None])
    traffic = csr_array(kron(problem.cut_costs[None, :], eye_array(m)))
    finish = hstack([compute, traffic, -np.ones((m, 1))], format="csr")
    changes = block_array([[here - after, -y, none], [after - here, -y, none]], format="csr")
    return [LinearConstraint(finish, -np.inf, 0.0), LinearConstraint(changes, -np.inf, 0.0)]
