"""Operators of the genetic algorithm for free placements, whose cost is the time of a step.

A gene is the device of a partition. Operators change *runs*, which are consecutive partitions on
one device, because each change of device is a cut that costs messages. A child takes the genes of
one parent before a cut of either parent, and those of the other parent after it. A neighbour has a
boundary moved, a run given to another device, the devices of two runs exchanged, or a few
partitions given to another device. Every device keeps a partition, and the last partition stays on
device 0, the driver's.
"""

from itertools import pairwise

import numpy as np

from lightning_hybrid.planning.step_problem import StepProblem

DevicesOfPartitions = tuple[int, ...]


class FreePlacements:
    """The free placements of a `StepProblem`, as a search space for `allocation.evolve`.

    Genes are a tuple with the device of each partition, by index in the replica.
    """

    def __init__(self, problem: StepProblem) -> None:
        self.problem = problem

    def cost(self, genes: DevicesOfPartitions) -> float:
        """Predicted seconds of a step; infinite if a device has too little memory."""
        return self.problem.step_time_s(*runs(genes))

    def random(self, rng: np.random.Generator) -> DevicesOfPartitions:
        """Make a random placement with one to three runs per device on average.

        It fits into memory, unless none of 50 tries does.
        """
        n, m = self.problem.n, self.problem.m
        count = int(rng.integers(m, min(n, 3 * m) + 1))
        # with little memory most random placements do not fit: try some here, since generations
        # would be spent on finding one that does
        for _ in range(50):
            cuts = np.sort(rng.choice(n - 1, count - 1, replace=False)) + 1
            devices = rng.permutation(np.concatenate([np.arange(m), rng.integers(m, size=count)]))
            genes = self._mended(np.repeat(devices[:count], np.diff([0, *cuts, n])).tolist(), rng)
            if self.problem.fits(*runs(genes)):
                break
        return genes

    def cross(
        self, left: DevicesOfPartitions, right: DevicesOfPartitions, rng: np.random.Generator
    ) -> DevicesOfPartitions:
        """Make a child: the genes of `left` before a cut of either parent, of `right` after it."""
        cuts = [*runs(left)[0][:-1], *runs(right)[0][:-1]]
        if not cuts:
            return left
        cut = int(rng.choice(cuts))
        return self._mended([*left[:cut], *right[cut:]], rng)

    def neighbour(
        self, genes: DevicesOfPartitions, rng: np.random.Generator
    ) -> DevicesOfPartitions:
        """Make a copy of a placement with one random change; see the module for the changes."""
        ends, devices = runs(genes)
        ends, devices = list(ends), list(devices)
        kind, m = rng.random(), self.problem.m
        if kind < 0.45 and len(ends) > 1:
            place = int(rng.integers(len(ends) - 1))
            ends[place] += int(rng.integers(1, 4)) * (1 if rng.random() < 0.5 else -1)
            low, high = (ends[place - 1] if place else 0), ends[place + 1]
            ends[place] = min(max(ends[place], low), high)
        elif kind < 0.6:
            devices[int(rng.integers(len(devices)))] = int(rng.integers(m))
        elif kind < 0.75 and len(ends) > 1:
            one, other = rng.choice(len(devices), 2, replace=False)
            devices[one], devices[other] = devices[other], devices[one]
        else:
            first = int(rng.integers(self.problem.n))
            last = min(self.problem.n, first + int(rng.integers(1, 5)))
            changed = list(genes)
            changed[first:last] = [int(rng.integers(m))] * (last - first)
            return self._mended(changed, rng)
        return self._mended(np.repeat(devices, np.diff([0, *ends])).tolist(), rng)

    def _mended(self, genes: list[int], rng: np.random.Generator) -> DevicesOfPartitions:
        """Put the last partition on device 0, and give each empty device a random partition."""
        # the driver computes the loss, so it must have the end of the network
        genes[-1] = 0
        missing = set(range(self.problem.m)) - set(genes)
        for device in sorted(missing):
            counts = np.bincount(genes, minlength=self.problem.m)
            spare = [i for i, j in enumerate(genes[:-1]) if counts[j] > 1]
            genes[int(rng.choice(spare))] = device
        return tuple(genes)


def runs(genes: DevicesOfPartitions) -> tuple[list[int], list[int]]:
    """Find the runs of a placement: consecutive partitions on one device.

    Args:
        genes: the device of each partition.

    Returns:
        For each run its end, the number after its last partition; and for each run its device.
    """
    ends = [i for i, (a, b) in enumerate(pairwise(genes), 1) if a != b]
    return [*ends, len(genes)], [genes[i] for i in (0, *ends)]
