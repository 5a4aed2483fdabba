"""How good and how fast is GABRA, beside brute force, a bound and its literal reading?

Run: python benchmarks/allocation_quality.py [--instances 200]
"""

import argparse
from itertools import product
from time import process_time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_hybrid.allocation import Floats, Problem, allocate
from lightning_hybrid.allocation.gabra import GabraSettings, gabra
from lightning_hybrid.allocation.knapsack import Objective
from lightning_hybrid.allocation.literal import literal_gabra
from lightning_hybrid.errors import AllocationError

Rng = np.random.Generator


def uniform(rng: Rng, n: int) -> Floats:
    return rng.uniform(0.1, 1.0, n)


def heavy_tailed(rng: Rng, n: int) -> Floats:
    return rng.lognormal(0.0, 1.0, n)


def small(rng: Rng, objective: Objective) -> Problem:
    m = int(rng.integers(1, 4))
    n = int(rng.integers(m, 8))
    loads, capacities = uniform(rng, n), rng.uniform(0.3, 1.0, m)
    cuts = np.empty(0) if objective == "profit" else rng.uniform(0.0, 0.2, n - 1)
    if objective == "profit":
        room = max(1.2 * loads.sum() / capacities.sum(), loads.max() / capacities.max())
        # and for each device, the smallest too, a partition that it can take
        room = max(room, *(np.sort(loads)[:m] / np.sort(capacities)))
        capacities *= room
    return Problem(loads, capacities, cut_costs=cuts, objective=objective, contiguous=False)


def brute_force(problem: Problem) -> float:
    every = np.array(list(product(range(problem.m), repeat=problem.n)))
    return float(problem.costs(every).min())


def found(problem: Problem, search: Any) -> float:
    try:
        return float(search(problem)[1][-1])
    except AllocationError:
        return np.inf


def against_brute_force(instances: int, search: Any) -> Table:
    table = Table("objective", "instances", "optimal", "CPU seconds each")
    for objective in ("makespan", "profit"):
        rng, hits, seconds = np.random.default_rng(0), 0, 0.0
        for _ in range(instances):
            problem = small(rng, objective)  # type: ignore[arg-type]
            start = process_time()
            cost = found(problem, search)
            seconds += process_time() - start
            best = brute_force(problem)
            hits += cost == best or abs(cost - best) <= 1e-9 * abs(best)
        table.add_row(objective, str(instances), str(hits), f"{seconds / instances:.3f}")
    return table


def unequal(rng: Rng, m: int) -> Floats:
    return rng.uniform(0.5, 1.5, m)


def large(seed: int, kind: str, *, contiguous: bool = False) -> Problem:
    rng, n, m = np.random.default_rng(seed), 50, 8
    loads = (heavy_tailed if "heavy" in kind else uniform)(rng, n)
    speeds = np.ones(m) if "equal devices" in kind else unequal(rng, m)
    cuts = rng.uniform(0.0, 0.2, n - 1) if "cut" in kind else np.empty(0)
    return Problem(loads, speeds, cut_costs=cuts, contiguous=contiguous)


def row(
    table: Table, name: str, problems: list[Problem], choice: GabraSettings | None = None
) -> None:
    gaps, seconds = [], []
    for seed, problem in enumerate(problems):
        start = process_time()
        cost = gabra(problem, seed, choice)[1][-1]
        seconds.append(process_time() - start)
        gaps.append(100 * (cost / problem.bound - 1))
    numbers = (np.median(gaps), np.quantile(gaps, 0.95), np.max(gaps))
    cells = [f"{number:.2f} %" for number in numbers]
    cells.append(f"{np.mean(seconds):.2f} (max {np.max(seconds):.2f})")
    table.add_row(name, str(len(problems)), *cells)


def gap_table(title: str) -> Table:
    return Table(title, "instances", "median gap", "95 %", "worst", "CPU seconds each")


def fifty(instances: int) -> Table:
    table = gap_table("50 partitions on 8 devices, to a bound")
    for kind in ("equal devices", "unequal", "unequal, heavy-tailed"):
        row(table, kind, [large(seed, kind) for seed in range(max(1, instances // 4))])
    return table


def with_cuts(instances: int) -> str:
    """With cut costs nothing is known to be optimal in time; the best chain is one placement."""
    gains = []
    for seed in range(instances):
        free, chain = large(seed, "cut"), large(seed, "cut", contiguous=True)
        gains.append(100 * (gabra(free, seed)[1][-1] / allocate(chain).value - 1))
    median, low, high = np.median(gains), np.min(gains), np.max(gains)
    return f"against the best chain: median {median:+.2f} %, from {low:+.2f} % to {high:+.2f} %"


def ablation(instances: int) -> Table:
    """What the genetic part brings, and what the local refinement does."""
    kind = "unequal"
    table = gap_table(kind)
    problems = [large(seed, kind) for seed in range(instances)]
    evaluations = GabraSettings().population + GabraSettings().generations
    for name, choice in (
        ("GABRA", GabraSettings()),
        ("as many refined random members", GabraSettings(population=evaluations, generations=0)),
        ("the initial population alone", GabraSettings(generations=0)),
        ("no refinement", GabraSettings(refine=False)),
        ("no refinement, 20 x the generations", GabraSettings(refine=False, generations=3000)),
    ):
        row(table, name, problems, choice)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    instances = parser.parse_args().instances
    console = Console()
    console.print("Repaired GABRA against brute force, n <= 7, m <= 3")
    console.print(against_brute_force(instances, gabra))
    console.print("Literal GABRA (the paper's text) against brute force, n <= 7, m <= 3")
    console.print(against_brute_force(instances, literal_gabra))
    console.print(fifty(instances))
    console.print("With cut costs,", with_cuts(max(1, instances // 10)))
    console.print("What the parts bring")
    console.print(ablation(max(1, instances // 4)))


if __name__ == "__main__":
    main()
