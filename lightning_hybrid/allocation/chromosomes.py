"""The chromosomes of GABRA: two representations of an assignment, and the operators on them.

`Labels` is the paper's chromosome, for free assignments: gene i is the device of partition i.

`Runs` is for contiguous assignments. On labels the paper's operators would hardly ever give a
contiguous child. So a chromosome has one gene per *run* (the consecutive partitions of a device),
in the order of the chain: `(device of the run, end of the run)`. The paper's operators keep their
meaning: mid-point crossover takes the left half of one chain and the right half of the other;
inversion reverses a stretch of the chain, lengths and devices. What a crossover makes invalid (a
device twice, ends out of order) is repaired with as few changes as possible.

Both have two operators that the paper lacks: a mutation that reaches what inversion cannot (labels
or boundaries absent from the population), and `refine`, a local search. No operator uses an exact
solver.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hybrid.allocation.knapsack import Floats, Ints, Problem


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Parameters of the genetic algorithm; those that the paper gives are marked.

    Attributes:
        population: number of members.
        generations: t_max, the number of generations.
        crossover: probability of a crossover (paper).
        mutation: probability of each mutation.
        tries: number of rejected children in a row after which a generation is given up.
        tolerance: relative distance from the proven bound at which a large problem counts as
            solved.
        refine: whether new members are improved by local search; `False` is for measuring its
            effect.
    """

    population: int = 40
    generations: int = 150
    crossover: float = 0.8
    mutation: float = 0.6
    tries: int = 60
    tolerance: float = 1e-3
    refine: bool = True


def roulette(fitness: Floats, rng: np.random.Generator) -> int:
    """Draw the index of a member, with a probability in proportion to its fitness (0 or more)."""
    spin = rng.random() * fitness.sum()
    return min(int(np.searchsorted(np.cumsum(fitness), spin)), len(fitness) - 1)


def stretch(length: int, rng: np.random.Generator) -> slice:
    """A random slice, not empty, of a sequence of this length."""
    first, last = np.sort(rng.choice(length + 1, 2, replace=False))
    return slice(int(first), int(last))


def renumbered(devices: Ints, problem: Problem) -> Ints:
    """Renumber equal devices in order of appearance."""
    if len(set(problem.classes)) == problem.m:
        return devices
    # for each class of equal devices their numbers, given out in the order of appearance
    free = [iter([j for j, c in enumerate(problem.classes) if c == k]) for k in range(problem.m)]
    name: dict[int, int] = {}
    for device in devices.tolist():
        if device not in name:
            name[device] = next(free[problem.classes[device]])
    return np.array([name[device] for device in devices.tolist()])
