"""How good is GABRA, and how fast? Against brute force, the exact solvers and its literal reading.

Run: python benchmarks/allocation_quality.py [--instances 200]
"""

import argparse
from collections.abc import Callable
from itertools import product
from time import process_time

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_hybrid.allocation.exact import solve_exactly
from lightning_hybrid.allocation.gabra import Settings, gabra
from lightning_hybrid.allocation.knapsack import Floats, Objective, Problem, make_problem
from lightning_hybrid.errors import AllocationError

Rng = np.random.Generator


def uniform(rng: Rng, n: int) -> Floats:
    return rng.uniform(0.1, 1.0, n)


def heavy_tailed(rng: Rng, n: int) -> Floats:
    return rng.lognormal(0.0, 1.0, n)


def small(rng: Rng, objective: Objective, contiguous: bool) -> Problem:
    m = int(rng.integers(1, 4))
    n = int(rng.integers(m, 8))
    loads, capacities = uniform(rng, n), rng.uniform(0.3, 1.0, m)
    cuts = None if objective == "profit" else rng.uniform(0.0, 0.2, n - 1)
    if objective == "profit":
        room = max(1.2 * loads.sum() / capacities.sum(), loads.max() / capacities.max())
        capacities *= room
    return make_problem(
        loads, capacities, cut_costs=cuts, objective=objective, contiguous=contiguous
    )


def brute_force(problem: Problem) -> float:
    every = np.array(list(product(range(problem.m), repeat=problem.n)))
    if problem.contiguous:
        every = every[(every[:, 1:] != every[:, :-1]).sum(axis=1) == problem.m - 1]
    return float(problem.costs(every).min())


def found(problem: Problem, settings: Settings | None = None) -> float:
    try:
        return gabra(problem, 0, settings)[1][-1]
    except AllocationError:
        return np.inf


def against_brute_force(instances: int, settings: Settings | None = None) -> Table:
    table = Table("objective", "contiguous", "instances", "optimal", "CPU seconds each")
    for objective, contiguous in product(("makespan", "profit"), (True, False)):
        if settings and settings.literal and contiguous:
            continue
        rng, hits, seconds = np.random.default_rng(0), 0, 0.0
        for _ in range(instances):
            problem = small(rng, objective, contiguous)  # type: ignore[arg-type]
            start = process_time()
            cost = found(problem, settings)
            seconds += process_time() - start
            best = brute_force(problem)
            hits += cost == best or abs(cost - best) <= 1e-9 * abs(best)
        row = (objective, contiguous, instances, hits, f"{seconds / instances:.3f}")
        table.add_row(*map(str, row))
    return table


def chain(
    name: str,
    table: Table,
    count: int,
    n: int,
    m: int,
    draw: Callable[[Rng, int], Floats],
    speeds: Callable[[Rng, int], Floats],
    cuts: bool,
) -> None:
    gaps, seconds, exact_seconds = [], [], []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        costs = rng.uniform(0.0, 0.2, n - 1) if cuts else None
        problem = make_problem(draw(rng, n), speeds(rng, m), cut_costs=costs)
        start = process_time()
        cost = gabra(problem, seed)[1][-1]
        middle = process_time()
        best = problem.costs(solve_exactly(problem)[None])[0]
        exact_seconds.append(process_time() - middle)
        seconds.append(middle - start)
        gaps.append(100 * (cost / best - 1))
    numbers = (np.median(gaps), np.quantile(gaps, 0.95), np.max(gaps))
    table.add_row(
        name,
        str(count),
        *(f"{number:.2f} %" for number in numbers),
        f"{np.mean(seconds):.2f} (max {np.max(seconds):.2f})",
        f"{np.mean(exact_seconds):.3f}",
    )


def equal(rng: Rng, m: int) -> Floats:
    return np.ones(m)


def unequal(rng: Rng, m: int) -> Floats:
    return rng.uniform(0.5, 1.5, m)


def chains(instances: int) -> Table:
    table = Table("chain", "instances", "median gap", "95 %", "worst", "GABRA CPU s", "exact CPU s")
    quarter = max(1, instances // 4)
    chain("50 on 8 equal", table, quarter, 50, 8, uniform, equal, True)
    chain("50 on 8 unequal", table, quarter, 50, 8, uniform, unequal, False)
    chain("50 on 8 unequal, cut costs", table, quarter, 50, 8, uniform, unequal, True)
    chain("50 on 8 unequal, heavy-tailed", table, quarter, 50, 8, heavy_tailed, unequal, True)
    chain("1000 on 64 equal", table, 2, 1000, 64, uniform, equal, False)
    chain("1000 on 64 equal, cut costs", table, 2, 1000, 64, uniform, equal, True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    instances = parser.parse_args().instances
    console = Console()
    console.print("Repaired GABRA against brute force, n <= 7, m <= 3")
    console.print(against_brute_force(instances))
    console.print("Literal GABRA (the paper's text) against brute force, n <= 7, m <= 3")
    console.print(against_brute_force(instances, Settings(literal=True)))
    console.print("Makespan of contiguous allocations, against dynamic programming")
    console.print(chains(instances))


if __name__ == "__main__":
    main()
