"""What GABRA breeds: two ways to write an assignment as genes, and the operators on them.

`Labels` is the paper's chromosome: gene i is the device of partition i. It suits free assignments.

`Runs` is for contiguous ones. On labels the paper's operators would tear runs apart: a reversed or
recombined chromosome is almost never contiguous. So a chromosome has one gene per *run* instead, in
the order of the chain: `(device of the run, end of the run)`. The paper's operators then keep their
meaning: mid-point crossover takes the left half of one chain and the right half of the other;
inversion reverses a stretch of the chain, lengths and devices. What a crossover breaks (a device
twice, ends out of order) is put right by the least change.

Both know two operators that the paper lacks: a mutation that reaches what inversion cannot (labels
or boundaries absent from the population), and `refine`, a local search. No operator looks at an
exact solver.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lightning_hybrid.allocation.knapsack import Floats, Ints, Problem


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Numbers of the algorithm; those that the paper gives are marked so.

    Attributes:
        population: number of members.
        generations: t_max, the number of generations.
        crossover: probability of a crossover (paper).
        mutation: probability of each mutation.
        tries: children in a row that may be rejected before a generation is given up.
        tolerance: how far from a proven bound, relative to it, the best value of a large problem
            may stay.
        refine: whether new members are improved by local moves; without, for measuring what they
            bring.
    """

    population: int = 40
    generations: int = 150
    crossover: float = 0.8
    mutation: float = 0.6
    tries: int = 60
    tolerance: float = 1e-3
    refine: bool = True


class Genes(Protocol):
    """The operators of a representation. A chromosome is an integer array."""

    def random(self, rng: np.random.Generator) -> Ints:
        """A random feasible chromosome (Algorithm 2)."""

    def crossover(self, left: Ints, right: Ints) -> Ints:
        """The first half of one parent and the second half of the other (Algorithm 3)."""

    def invert(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Reverse a random stretch (the paper's mutation)."""

    def perturb(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Change one gene at random."""

    def refine(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Improve by local moves until none is found."""

    def canonical(self, genes: Ints) -> Ints:
        """The same with equal devices numbered in order of appearance.

        Assignments that differ only in the names of equal devices are one chromosome, not many.
        """

    def decode(self, genes: Ints) -> Ints:
        """The assignment, shape (n,)."""


def roulette(fitness: Floats, rng: np.random.Generator) -> int:
    """Draw a member, each with a chance in proportion to its fitness (0 or more)."""
    spin = rng.random() * fitness.sum()
    return min(int(np.searchsorted(np.cumsum(fitness), spin)), len(fitness) - 1)


def stretch(length: int, rng: np.random.Generator) -> slice:
    first, last = np.sort(rng.choice(length + 1, 2, replace=False))
    return slice(int(first), int(last))


def renumbered(devices: Ints, problem: Problem) -> Ints:
    """Name equal devices anew, in order of appearance."""
    if len(set(problem.classes)) == problem.m:
        return devices
    # per class its devices, handed out in the order in which the chromosome names them
    free = [iter([j for j, c in enumerate(problem.classes) if c == k]) for k in range(problem.m)]
    name: dict[int, int] = {}
    for device in devices.tolist():
        if device not in name:
            name[device] = next(free[problem.classes[device]])
    return np.array([name[device] for device in devices.tolist()])
