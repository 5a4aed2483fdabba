"""Chromosomes of free assignments: one gene per partition."""

from dataclasses import dataclass

import numpy as np

from lightning_hybrid.allocation.chromosomes import renumbered, stretch
from lightning_hybrid.allocation.contiguous_chromosomes import Runs
from lightning_hybrid.allocation.knapsack import SLACK, Floats, Ints, Problem
from lightning_hybrid.errors import AllocationError

_LOOKED_AT = 512
"""Changes that the local search looks at before it takes the best of them."""


class Labels:
    """Free assignments: gene i is the device of partition i, shape (n,)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._cuts_cost = problem.objective == "makespan" and bool(problem.cut_costs.any())
        self._runs = Runs(problem)

    def random(self, rng: np.random.Generator) -> Ints:
        """A random member; where cuts cost something, every second one is made of runs.

        Partitions that are strewn at random have a cut after each, and no single move mends that.
        """
        if self._cuts_cost and rng.random() < 0.5:
            try:
                return self._runs.decode(self._runs.refine(self._runs.random(rng), rng))
            except AllocationError:
                pass  # no contiguous one was found; there may be others
        return self.strewn(rng)

    def strewn(self, rng: np.random.Generator) -> Ints:
        """Place one partition after the other on a random device with room.

        Dead ends are left by going back. On small problems that decides whether there is a feasible
        assignment; on larger ones the number of steps is bounded.
        """
        problem = self.problem
        heavy = problem.weights.sum(axis=0) * rng.uniform(0.5, 1.0, problem.n)
        order = np.argsort(-heavy, kind="stable")  # the heavy ones while there is room
        genes = np.full(problem.n, -1, dtype=np.int64)
        choices: list[list[int]] = []
        for _ in range(20_000 + 10 * problem.n):
            if len(choices) == problem.n:
                return genes
            choices.append(self._places(genes, int(order[len(choices)]), rng))
            while choices and not choices[-1]:
                choices.pop()
                if not choices:
                    raise AllocationError(
                        "no assignment keeps every device within its limits: "
                        "use more or larger devices, or smaller partitions"
                    )
                genes[order[len(choices) - 1]] = -1
            genes[order[len(choices) - 1]] = choices[-1].pop()
        raise AllocationError(
            f"found no assignment of {problem.n} partitions to {problem.m} devices within their "
            "limits: use more or larger devices, or method='exact', which decides it"
        )

    def _places(self, genes: Ints, partition: int, rng: np.random.Generator) -> list[int]:
        """The devices that can take the partition next, in random order; the last comes first."""
        problem, placed = self.problem, genes >= 0
        counts = np.bincount(genes[placed], minlength=problem.m)
        room = np.ones(problem.m, dtype=bool)
        for weights, ceilings in zip(problem.weights, problem.ceilings):
            used = np.bincount(genes[placed], weights[placed], minlength=problem.m)
            room &= used + weights[partition] <= ceilings
        if problem.n - placed.sum() == (counts == 0).sum():
            room &= counts == 0  # each remaining partition is needed on a device of its own
        if partition == problem.n - 1 and problem.last_device is not None:
            room &= np.arange(problem.m) == problem.last_device
        return [int(j) for j in rng.permutation(np.flatnonzero(room))]

    def crossover(self, left: Ints, right: Ints) -> Ints:
        middle = len(left) // 2
        return np.concatenate([left[:middle], right[middle:]])

    def invert(self, genes: Ints, rng: np.random.Generator) -> Ints:
        genes, piece = genes.copy(), stretch(len(genes), rng)
        genes[piece] = genes[piece][::-1]
        return genes

    def perturb(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Give one partition, or where cuts cost something a stretch of them, another device."""
        genes, place = genes.copy(), int(rng.integers(len(genes)))
        piece = slice(place, place + 1)
        if self._cuts_cost and rng.random() < 0.5:
            piece = stretch(len(genes), rng)
        genes[piece] = rng.integers(self.problem.m)
        return genes

    def refine(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Move a partition or exchange two while that helps.

        For the makespan only the partitions of the slowest device matter. Between changes that
        leave the same makespan the one after which the times are closest to each other is taken.
        """
        cost = float(self.problem.costs(genes[None])[0])
        if not np.isfinite(cost):
            return genes
        now = (cost, np.inf)
        while True:
            changes = self._changes(genes, rng)
            if not len(changes.first):
                return genes
            costs, spreads = self._after(genes, changes)
            best = int(np.lexsort((spreads, costs))[0])
            after = float(costs[best]), float(spreads[best])
            if not _less(after, now):
                return genes
            genes, now = changes.applied(genes, best), after

    def _changes(self, genes: Ints, rng: np.random.Generator) -> "_Changes":
        """The exchanges of a partition with another one or with an empty place on a device."""
        n, m = self.problem.n, self.problem.m
        here = np.arange(n)
        if self.problem.objective == "makespan":
            here = np.flatnonzero(genes == self.problem.times(genes[None])[0].argmax())
        first, second = np.repeat(here, n + m), np.tile(np.arange(n + m), len(here))
        if len(first) > _LOOKED_AT:
            some = rng.choice(len(first), _LOOKED_AT, replace=False)
            first, second = first[some], second[some]
        places = np.concatenate([genes, np.arange(m)])
        allowed = places[first] != places[second]
        if self.problem.last_device is not None:
            allowed &= (first != n - 1) & (second != n - 1)
        first, second = first[allowed], second[allowed]
        return _Changes(first, second, places[first], places[second])

    def _after(self, genes: Ints, changes: "_Changes") -> tuple[Floats, Floats]:
        """Cost after each change, infinite beyond a limit, and the spread of the times."""
        problem, here, there = self.problem, changes.here, changes.there
        counts = np.bincount(genes, minlength=problem.m)
        possible = (changes.second < problem.n) | (counts[here] > 1)
        for weights, ceilings in zip(problem.weights, problem.ceilings):
            used, more = np.bincount(genes, weights, minlength=problem.m), changes.net(weights)
            possible &= used[there] + more <= ceilings[there]
            possible &= used[here] - more <= ceilings[here]
        more = changes.net(problem.loads)
        slower, faster = more / problem.capacities[there], more / problem.capacities[here]
        if problem.objective == "profit":
            costs = faster - slower - problem.values(genes[None])
            return np.where(possible, costs, np.inf), np.zeros(len(costs))
        times = problem.times(genes[None])[0]
        if self._cuts_cost:
            rows, table = np.arange(len(here)), np.repeat(times[None], len(here), axis=0)
            table[rows, here] -= faster
            table[rows, there] += slower
            self._recount_cuts(genes, changes, table)
            costs, spreads = table.max(axis=1), np.square(table).sum(axis=1)
        else:
            new_here, new_there = times[here] - faster, times[there] + slower
            order = np.argsort(times)  # `here` is the slowest device
            others = np.full(problem.m, times[order[-2]])
            others[order[-2]] = times[order[-3]] if problem.m > 2 else 0.0
            costs = np.maximum(np.maximum(new_here, new_there), others[there])
            spreads = new_here**2 + new_there**2 - times[here] ** 2 - times[there] ** 2
            spreads += np.square(times).sum()
        return np.where(possible, costs, np.inf), spreads

    def _recount_cuts(self, genes: Ints, changes: "_Changes", times: Floats) -> None:
        """Take the cuts beside the changed partitions out of the times and put the new ones in."""
        n, rows = self.problem.n, np.arange(len(changes.first))
        edges = [changes.first - 1, changes.first, changes.second - 1, changes.second]
        for number, edge in enumerate(edges):
            valid = (edge >= 0) & (edge < n - 1)
            if number > 1:
                valid &= (changes.second < n) & (edge != edges[0]) & (edge != edges[1])
            row, cut = rows[valid], edge[valid]
            costs = self.problem.cut_costs[cut]
            before = genes[cut], genes[cut + 1]
            after = changes.labels(genes, row, cut), changes.labels(genes, row, cut + 1)
            for (left, right), sign in ((before, -1), (after, 1)):
                paid = sign * np.where(left != right, costs, 0.0)
                times[row, left] += paid
                times[row, right] += paid

    def canonical(self, genes: Ints) -> Ints:
        return renumbered(genes, self.problem)

    def decode(self, genes: Ints) -> Ints:
        return genes


def _less(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether the first rank is smaller by more than rounding."""
    slack = [SLACK * abs(number) for number in other]
    if one[0] < other[0] - slack[0]:
        return True
    return bool(one[0] <= other[0] and one[1] < other[1] - slack[1])


@dataclass(frozen=True)
class _Changes:
    """Exchanges, one per row, of a partition with what is on another device.

    Numbers from n on are empty places: n + j is one on device j.

    Attributes:
        first: the partition that leaves.
        second: the partition or the empty place that it changes with.
        here: the device that it leaves.
        there: the device that it goes to.
    """

    first: Ints
    second: Ints
    here: Ints
    there: Ints

    def net(self, weights: Floats) -> Floats:
        """How much more goes there than comes back."""
        back = np.append(weights, 0.0)[np.minimum(self.second, len(weights))]
        return np.asarray(weights[self.first] - back)

    def labels(self, genes: Ints, rows: Ints, partitions: Ints) -> Ints:
        """Devices of partitions after the changes of these rows."""
        devices = np.where(self.first[rows] == partitions, self.there[rows], genes[partitions])
        return np.where(self.second[rows] == partitions, self.here[rows], devices)

    def applied(self, genes: Ints, row: int) -> Ints:
        genes = genes.copy()
        genes[self.first[row]] = self.there[row]
        if self.second[row] < len(genes):
            genes[self.second[row]] = self.here[row]
        return genes
