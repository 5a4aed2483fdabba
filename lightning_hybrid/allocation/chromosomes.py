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

from typing import Protocol

import numpy as np

from lightning_hybrid.allocation.knapsack import SLACK, Ints, Problem
from lightning_hybrid.errors import AllocationError


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


def _stretch(length: int, rng: np.random.Generator) -> slice:
    first, last = np.sort(rng.choice(length + 1, 2, replace=False))
    return slice(int(first), int(last))


def _renumbered(devices: Ints, problem: Problem) -> Ints:
    """Name equal devices anew, in order of appearance."""
    if len(set(problem.classes)) == problem.m:
        return devices
    free = [iter([j for j, c in enumerate(problem.classes) if c == k]) for k in range(problem.m)]
    name: dict[int, int] = {}
    for device in devices.tolist():
        if device not in name:
            name[device] = next(free[problem.classes[device]])
    return np.array([name[device] for device in devices.tolist()])


class Labels:
    """Free assignments: gene i is the device of partition i, shape (n,)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def random(self, rng: np.random.Generator) -> Ints:
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
        genes, stretch = genes.copy(), _stretch(len(genes), rng)
        genes[stretch] = genes[stretch][::-1]
        return genes

    def perturb(self, genes: Ints, rng: np.random.Generator) -> Ints:
        genes = genes.copy()
        genes[rng.integers(len(genes))] = rng.integers(self.problem.m)
        return genes

    def refine(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Move a partition or swap two while that helps.

        For the makespan only those of the slowest device matter.
        """
        cost = self.problem.costs(genes[None])[0]
        while True:
            candidates = self._neighbours(genes, rng)
            costs = self.problem.costs(candidates)
            if not costs.min() < cost - SLACK * abs(cost):
                return genes
            genes, cost = candidates[costs.argmin()], costs.min()

    def _neighbours(self, genes: Ints, rng: np.random.Generator, most: int = 256) -> Ints:
        problem = self.problem
        here = there = np.arange(problem.n)
        if problem.objective == "makespan":
            slow = genes == problem.times(genes[None])[0].argmax()
            here, there = np.flatnonzero(slow), np.flatnonzero(~slow)
        moves = len(here) * problem.m
        picks = np.arange(moves + len(here) * len(there))
        if len(picks) > most:
            picks = rng.choice(picks, most, replace=False)
        candidates = np.repeat(genes[None], len(picks), axis=0)
        move = np.flatnonzero(picks < moves)
        candidates[move, here[picks[move] // problem.m]] = picks[move] % problem.m
        swap = np.flatnonzero(picks >= moves)
        if swap.size:
            first, second = np.divmod(picks[swap] - moves, len(there))
            candidates[swap, here[first]] = genes[there[second]]
            candidates[swap, there[second]] = genes[here[first]]
        return candidates

    def canonical(self, genes: Ints) -> Ints:
        return _renumbered(genes, self.problem)

    def decode(self, genes: Ints) -> Ints:
        return genes


class Runs:
    """Contiguous assignments: column r is `(device, end)` of run r, shape (2, m).

    Run r holds the partitions from the end of the run before up to its own end, exclusively.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._sums = np.concatenate([[0.0], np.cumsum(problem.loads)])
        self._edge: list[float] = [0.0, *problem.cut_costs.tolist(), 0.0]
        self._weights = [np.concatenate([[0.0], np.cumsum(w)]) for w in problem.weights]
        # Plain lists: the local search reads single numbers, where arrays are slow.
        self._load: list[float] = self._sums.tolist()
        self._speed: list[float] = problem.capacities.tolist()
        self._limited = [
            (sums.tolist(), ceilings.tolist())
            for sums, ceilings in zip(self._weights, problem.ceilings)
        ]

    def random(self, rng: np.random.Generator) -> Ints:
        """Draw the order of the devices, then the ends, within the limits.

        Most chromosomes have their ends near the fair places, some have them anywhere.
        """
        for _ in range(200):
            order = self._pinned(rng.permutation(self.problem.m))
            ends = self._random_ends(order, rng)
            if ends is not None:
                return np.array([order, ends])
        raise AllocationError(
            f"found no contiguous assignment of {self.problem.n} partitions to {self.problem.m} "
            "devices within their limits: use more or larger devices, or contiguous=False "
            "(method='exact' decides it)"
        )

    def _random_ends(self, order: Ints, rng: np.random.Generator) -> list[int] | None:
        n, m = self.problem.n, self.problem.m
        # The last devices must be able to take what is left: least[r] is the earliest end of run r.
        least = [n] * m
        for r in range(m - 1, 0, -1):
            least[r - 1] = max(self._reach_back(least[r], int(order[r])), r)
        share = np.cumsum(self.problem.capacities[order])
        fair = np.searchsorted(self._sums, share / share[-1] * self._sums[-1])
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
        n, m = self.problem.n, self.problem.m
        middle = m // 2
        genes = np.concatenate([left[:, :middle], right[:, middle:]], axis=1)
        # Each device once: the second half takes those that are left, in the other parent's order.
        taken = set(left[0, :middle].tolist())
        genes[0, middle:] = [j for j in right[0].tolist() if j not in taken]
        # Ends in order, with room for one partition in every run.
        steps = np.arange(m)
        genes[1] = np.maximum.accumulate(genes[1] - steps) + steps
        genes[1] = np.minimum(genes[1], n - steps[::-1])
        return genes

    def invert(self, genes: Ints, rng: np.random.Generator) -> Ints:
        stretch = _stretch(self.problem.m, rng)
        order, lengths = genes[0].copy(), _lengths(genes)
        order[stretch], lengths[stretch] = order[stretch][::-1], lengths[stretch][::-1]
        return np.array([order, np.cumsum(lengths)])

    def perturb(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Exchange two runs with their devices, or put one boundary elsewhere."""
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
        """Push partitions away from the slowest run, over full runs, to one with time left.

        Under `profit` no run is the slowest, and nothing is done.
        The goal is lowered while pushing succeeds; when it fails, the next goal is closer.
        """
        if self.problem.objective == "profit":
            return genes
        order, ends = genes[0].tolist(), genes[1].tolist()
        times = self._times(order, ends)
        worst = max(times)
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
        return np.array([order, ends])

    def _times(self, order: list[int], ends: list[int]) -> list[float]:
        return [self._time(j, a, b) for j, a, b in zip(order, [0, *ends], ends)]

    def _time(self, device: int, start: int, end: int) -> float:
        """Time of a run; infinite where it passes a limit."""
        for sums, ceilings in self._limited:
            if sums[end] - sums[start] > ceilings[device]:
                return np.inf
        compute = (self._load[end] - self._load[start]) / self._speed[device]
        return compute + self._edge[start] + self._edge[end]

    def _push(
        self, order: list[int], ends: list[int], r: int, goal: float, side: int
    ) -> list[int] | None:
        """Trim run r on one side until it meets the goal, then its neighbour, and so on."""
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
        return None

    def canonical(self, genes: Ints) -> Ints:
        return np.array([_renumbered(self._pinned(genes[0]), self.problem), genes[1]])

    def _pinned(self, order: Ints) -> Ints:
        """The order with the device of the last partition, if one is asked for, at the end."""
        if self.problem.last_device is None:
            return order
        order = order.copy()
        order[order == self.problem.last_device] = order[-1]
        order[-1] = self.problem.last_device
        return order

    def decode(self, genes: Ints) -> Ints:
        return np.repeat(genes[0], _lengths(genes))


def _lengths(genes: Ints) -> Ints:
    lengths: Ints = genes[1].copy()
    lengths[1:] -= genes[1, :-1]
    return lengths
