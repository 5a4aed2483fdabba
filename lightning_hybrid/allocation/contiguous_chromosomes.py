"""Chromosomes of contiguous assignments: one gene per run."""

import numpy as np

from lightning_hybrid.allocation.chromosomes import renumbered, stretch
from lightning_hybrid.allocation.knapsack import SLACK, Ints, Problem
from lightning_hybrid.errors import AllocationError

_EXCHANGES = 8
"""Number of runs with which the local search tries to exchange the slowest one."""
_WORK = 1_000_000
"""Most work of these exchanges for one chromosome; each counts n x m."""


class Runs:
    """Contiguous assignments: column r is `(device, end)` of run r, shape (2, m).

    Run r holds the partitions from the end of the run before up to its own end, exclusively.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._sums = np.concatenate([[0.0], np.cumsum(problem.loads)])
        self._edge: list[float] = [0.0, *problem.cut_costs.tolist(), 0.0]
        self._weights = [np.concatenate([[0.0], np.cumsum(w)]) for w in problem.weights]
        # Plain lists, since the local search reads single numbers, for which arrays are slow.
        self._load: list[float] = self._sums.tolist()
        self._speed: list[float] = problem.capacities.tolist()
        self._limited = [
            (sums.tolist(), ceilings.tolist())
            for sums, ceilings in zip(self._weights, problem.ceilings)
        ]

    def random(self, rng: np.random.Generator) -> Ints:
        """Draw the order of the devices, then the ends of their runs, within the limits.

        Most chromosomes have their ends near fair shares, some anywhere.
        """
        for _ in range(200):
            order = self._pinned(rng.permutation(self.problem.m))
            ends = self._random_ends(order, rng)
            if ends is not None:
                return np.array([order, ends])
        # with as many devices as partitions every assignment is contiguous
        free = ", or contiguous=False" if self.problem.n > self.problem.m else ""
        raise AllocationError(
            f"found no contiguous assignment of {self.problem.n} partitions to {self.problem.m} "
            f"devices within their limits: use more or larger devices{free} "
            "(method='exact' decides it)"
        )

    def _random_ends(self, order: Ints, rng: np.random.Generator) -> list[int] | None:
        """Draw ends for an order of devices within the limits; None: there was a dead end."""
        n, m = self.problem.n, self.problem.m
        # least[r] is the earliest end of run r for which the later devices can take the rest
        least = [n] * m
        for r in range(m - 1, 0, -1):
            least[r - 1] = max(self._reach_back(least[r], int(order[r])), r)
        share = np.cumsum(self.problem.capacities[order])
        fair = np.searchsorted(self._sums, share / share[-1] * self._sums[-1])
        # a mixture: members with fair shares alone would be too alike to recombine, and with many
        # partitions those with random ends are far from good ones
        spread = rng.uniform(0.0, 0.5) * n / m
        wanted = np.rint(fair + rng.normal(0.0, 1.0, m) * spread).astype(int)
        anywhere = rng.random() < 0.25
        ends, start = [], 0
        for r in range(m):
            low = max(start + 1, least[r])
            high = min(self._reach(start, int(order[r])), n - (m - 1 - r))
            if low > high:
                return None
            if anywhere:
                wanted[r] = rng.integers(low, high + 1)
            start = n if r == m - 1 else int(np.clip(wanted[r], low, high))
            ends.append(start)
        return ends

    def _reach(self, start: int, device: int) -> int:
        """The furthest end of a run that begins at `start`."""
        reach = self.problem.n
        for sums, ceilings in zip(self._weights, self.problem.ceilings):
            last = np.searchsorted(sums, sums[start] + ceilings[device], side="right")
            reach = min(reach, int(last) - 1)
        return reach

    def _reach_back(self, end: int, device: int) -> int:
        """The earliest start of a run that ends at `end`, at most `end - 1`."""
        reach = 0
        for sums, ceilings in zip(self._weights, self.problem.ceilings):
            reach = max(reach, int(np.searchsorted(sums, sums[end] - ceilings[device])))
        return min(reach, end - 1)

    def crossover(self, left: Ints, right: Ints) -> Ints:
        """A child with the first half of one parent and the second of the other (Algorithm 3)."""
        n, m = self.problem.n, self.problem.m
        middle = m // 2
        genes = np.concatenate([left[:, :middle], right[:, middle:]], axis=1)
        # each device once: the second half gets the rest, in the other parent's order
        taken = set(left[0, :middle].tolist())
        genes[0, middle:] = [j for j in right[0].tolist() if j not in taken]
        # rising ends, with at least one partition in every run
        steps = np.arange(m)
        genes[1] = np.maximum.accumulate(genes[1] - steps) + steps
        genes[1] = np.minimum(genes[1], n - steps[::-1])
        return genes

    def invert(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Reverse a random stretch (the paper's mutation)."""
        piece = stretch(self.problem.m, rng)
        order, lengths = genes[0].copy(), _lengths(genes)
        order[piece], lengths[piece] = order[piece][::-1], lengths[piece][::-1]
        return np.array([order, np.cumsum(lengths)])

    def perturb(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Exchange two runs with their devices, or divide the partitions of two runs anew."""
        # (on lengths, since ends must keep rising)
        order, lengths = genes[0].copy(), _lengths(genes)
        if self.problem.m == 1:
            return genes
        first, second = rng.choice(self.problem.m, 2, replace=False)
        if rng.random() < 0.7:
            pair, riap = [first, second], [second, first]
            order[pair], lengths[pair] = order[riap], lengths[riap]
        else:
            both = lengths[first] + lengths[second]
            lengths[first] = rng.integers(1, both)
            lengths[second] = both - lengths[first]
        return np.array([order, np.cumsum(lengths)])

    def refine(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Improve a solution, in which each device has one run of neighbouring partitions.

        The ends of the runs are moved until their times are even. Then the device of the slowest
        run changes places with others, and the ends are moved again, as long as that helps: moving
        finds nearly the best ends for an order of the devices, so the exchanges search the order.
        Under the objective `profit` no run is the slowest, and nothing is changed.
        """
        if self.problem.objective == "profit":
            return genes
        order, ends = genes[0].tolist(), genes[1].tolist()
        ends, worst = self._evened(order, ends, rng)
        # (each try balances all runs, which takes about n x m steps)
        better, tries = bool(np.isfinite(worst)), _WORK // (self.problem.n * self.problem.m)
        while better and tries > 0:
            better = False
            slowest = int(np.argmax(self._times(order, ends)))
            for other in rng.permutation(self.problem.m)[:_EXCHANGES].tolist():
                exchanged = self._exchanged(order, ends, slowest, other)
                if exchanged is None:
                    continue
                tries -= 1
                new_ends, new_worst = self._evened(*exchanged, rng)
                if new_worst < worst * (1 - SLACK):
                    order, ends, worst, better = exchanged[0], new_ends, new_worst, True
                    break
        return np.array([order, ends])

    def _exchanged(
        self, order: list[int], ends: list[int], first: int, second: int
    ) -> tuple[list[int], list[int]] | None:
        """Exchange two runs with their devices; None if that is not allowed or changes nothing."""
        classes, last = self.problem.classes, self.problem.last_device
        # exchanging runs of equal devices gives the same assignment
        if self.problem.order is not None or classes[order[first]] == classes[order[second]]:
            return None
        if last is not None and last in (order[first], order[second]):
            return None
        order, lengths = order.copy(), np.diff([0, *ends])
        order[first], order[second] = order[second], order[first]
        lengths[[first, second]] = lengths[[second, first]]
        return order, np.cumsum(lengths).tolist()

    def _evened(
        self, order: list[int], ends: list[int], rng: np.random.Generator
    ) -> tuple[list[int], float]:
        """Balance the runs of an order of devices: their ends, and the time of the slowest run.

        Partitions are pushed from the slowest run, through its neighbours, to one with time left,
        so that no run takes longer than a goal. If that fails, a goal nearer to the current time is
        tried.
        """
        times = self._times(order, ends)
        worst = max(times)
        # the first goal is the proven bound; each failure halves the gap to the current time
        gap = worst - self.problem.bound
        while gap > worst * 1e-4:
            r = times.index(worst)
            side = int(rng.choice((-1, 1)))
            pushed = self._push(order, ends, r, worst - gap, side)
            pushed = pushed or self._push(order, ends, r, worst - gap, -side)
            if pushed and max(new := self._times(order, pushed)) < worst:
                ends, times, worst = pushed, new, max(new)
                gap = min(gap, worst - self.problem.bound)
            else:
                gap /= 2
        return ends, worst

    def _times(self, order: list[int], ends: list[int]) -> list[float]:
        return [self._time(j, a, b) for j, a, b in zip(order, [0, *ends], ends)]

    def _time(self, device: int, start: int, end: int) -> float:
        """Time of a run with its cut costs; infinite if it exceeds a limit."""
        for sums, ceilings in self._limited:
            if sums[end] - sums[start] > ceilings[device]:
                return np.inf
        compute = (self._load[end] - self._load[start]) / self._speed[device]
        return compute + self._edge[start] + self._edge[end]

    def _push(
        self, order: list[int], ends: list[int], r: int, goal: float, side: int
    ) -> list[int] | None:
        """Trim run r on one side until it meets the goal, then its neighbour, and so on.

        Returns:
            The new ends; None: the goal cannot be met on this side.
        """
        bounds = [0, *ends]
        moved = 1 if side > 0 else 0  # its end or its start
        last = len(order) - 1 if side > 0 else 0
        time = self._time(order[r], bounds[r], bounds[r + 1])
        while r != last:
            while time > goal:
                if bounds[r + 1] - bounds[r] == 1:
                    return None
                bounds[r + moved] -= side
                time = self._time(order[r], bounds[r], bounds[r + 1])
            r += side
            time = self._time(order[r], bounds[r], bounds[r + 1])
            if time <= goal:
                return bounds[1:]
        return None  # even the outermost run takes longer than the goal

    def canonical(self, genes: Ints) -> Ints:
        """Renumber equal devices, so that assignments that differ only in these are one."""
        return np.array([renumbered(self._pinned(genes[0]), self.problem), genes[1]])

    def _pinned(self, order: Ints) -> Ints:
        """The order that is given, or `order` with `last_device`, if there is one, at its end."""
        if self.problem.order is not None:
            return np.array(self.problem.order)
        if self.problem.last_device is None:
            return order
        order = order.copy()
        order[order == self.problem.last_device] = order[-1]
        order[-1] = self.problem.last_device
        return order

    def decode(self, genes: Ints) -> Ints:
        """The assignment of a chromosome, shape (n,)."""
        return np.repeat(genes[0], _lengths(genes))


def _lengths(genes: Ints) -> Ints:
    lengths: Ints = genes[1].copy()
    lengths[1:] -= genes[1, :-1]
    return lengths
