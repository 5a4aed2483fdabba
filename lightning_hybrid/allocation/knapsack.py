"""The allocation problem: n network partitions on m devices, as a 0-1 multiple knapsack.

With loads p_i and capacities d_j the paper (Akintoye et al. 2022, Eqs. 3-8) asks for ::

    c_ij = p_i / d_j                            profit of partition i on device j      (3)
    max z = sum_ij x_ij c_ij                                                           (5)
    sum_i x_ij p_i <= d_j     for every j       capacity                               (6)
    sum_j x_ij = 1            for every i       one device per partition               (7)
    x_ij in {0, 1}                                                                     (4), (8)

and, in its prose, for at least one partition on each device. This is the objective `profit`.

It does not make training faster. On equal devices z = sum_i p_i / d whatever the assignment; on
unequal ones it is largest when the *smallest* devices are full; balance and traffic do not count.
An example with four partitions of load 1 on devices of capacity 2 and 4:

>>> from lightning_hybrid.allocation import Problem, allocate
>>> allocate(Problem([1, 1, 1, 1], [3, 3], objective="profit")).value == 4 / 3  # like all others
True
>>> allocate(Problem([1, 1, 1, 1], [2, 4], objective="profit")).assignment  # done after 2/2
(0, 0, 1, 1)
>>> allocate(Problem([1, 1, 1, 1], [2, 4], objective="makespan")).assignment  # done after 3/4
(0, 1, 1, 1)

`makespan`, the default, minimises the time of the slowest device, which determines that of a step::

    min max_j ( sum_i x_ij p_i / d_j + sum over cuts i beside j of k_i )

with d_j the relative speed of device j and k_i the cost of cutting between partitions i and i + 1,
charged to the devices on both sides. Memory is a hard limit, not a cost.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_hybrid.errors import AllocationError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Numbers = Sequence[float] | Floats
Objective = Literal["makespan", "profit"]

SLACK = 1e-9
"""Relative tolerance of limits for rounding errors, so that sums that fit exactly do fit."""


@dataclass(frozen=True, eq=False)
class Problem:
    """An allocation problem: n network partitions on m devices, at least one partition on each.

    An assignment is an integer array of shape (n,), the device of each partition. Most methods take
    b assignments at once, shape (b, n). Lists of numbers become arrays.

    Attributes:
        loads: (n,) computation of each partition, in seconds or FLOPs.
        capacities: (m,) relative speed of each device (`makespan`), or the load that it may carry
            (`profit`).
        cut_costs: (n - 1,) cost of cutting after a partition, charged to the devices on both sides,
            in the unit of load / capacity; empty: none. They do not count in `profit` (Eq. 5).
        memory: (n,) sizes of the partitions, to be given with `memory_limits`; empty: not limited.
        memory_limits: (m,) sizes that the devices may hold, hard limits.
        objective: `makespan` (the time of the slowest device is minimised) or `profit` (z of Eq. 5
            is maximised).
        contiguous: whether the devices form a chain in their order, each with consecutive
            partitions. If not, partitions are placed freely.
        last_device: device that must hold the last partition in a free placement; None: any.

    Raises:
        AllocationError: the numbers are wrong (negative, not finite, of unequal count), or there
            are more devices than partitions.
    """

    loads: Floats
    capacities: Floats
    _: KW_ONLY
    cut_costs: Floats = field(default_factory=lambda: np.empty(0))
    memory: Floats = field(default_factory=lambda: np.empty(0))
    memory_limits: Floats = field(default_factory=lambda: np.empty(0))
    objective: Objective = "makespan"
    contiguous: bool = True
    last_device: int | None = None

    def __post_init__(self) -> None:
        self._check_devices()
        limited = bool(len(self.memory))
        if limited != bool(len(self.memory_limits)):
            raise AllocationError("memory and memory_limits must be given together")
        cuts = self.cut_costs if len(self.cut_costs) else np.zeros(self.n - 1)
        for name, values in (
            ("loads", numbers("loads", self.loads)),
            ("capacities", numbers("capacities", self.capacities, positive=True)),
            ("cut_costs", numbers("cut_costs", cuts, count=self.n - 1)),
            ("memory", numbers("memory", self.memory, count=self.n * limited)),
            ("memory_limits", numbers("memory_limits", self.memory_limits, count=self.m * limited)),
        ):
            object.__setattr__(self, name, values)

    def _check_devices(self) -> None:
        n = self.n
        m = self.m
        last = self.last_device
        if self.objective not in ("makespan", "profit"):
            raise AllocationError(
                f"objective {self.objective!r} is neither 'makespan' nor 'profit'"
            )
        if m < 1 or n < m:
            raise AllocationError(
                f"{n} partitions cannot give each of {m} devices one: "
                "use fewer devices (stages), or cut the network into more partitions"
            )
        if last is not None and not 0 <= last < m:
            raise AllocationError(f"last_device({last}) is none of the devices 0..{m - 1}")
        if last is not None and self.contiguous and last < m - 1:
            raise AllocationError(
                f"last_device({last}) is not the last of the devices 0..{m - 1}, which form a "
                "chain in this order: give their numbers in another order, or contiguous=False"
            )

    @property
    def n(self) -> int:
        return len(self.loads)

    @property
    def m(self) -> int:
        return len(self.capacities)

    @property
    def _limited(self) -> list[tuple[Floats, Floats]]:
        """For each limited quantity its amounts in the partitions, (n,), and the limits, (m,).

        The quantities are the loads (`profit`), then the memory.
        """
        limited = [(self.loads, self.capacities)] if self.objective == "profit" else []
        if len(self.memory):
            limited.append((self.memory, self.memory_limits))
        return limited

    @cached_property
    def weights(self) -> Floats:
        """(k, n) amounts of k limited quantities in the partitions: loads (`profit`), memory."""
        return np.array([weights for weights, _ in self._limited]).reshape(-1, self.n)

    @cached_property
    def ceilings(self) -> Floats:
        """(k, m) limits of the k quantities in `weights` on each device.

        They are multiplied by 1 + `SLACK`, so that rounding alone exceeds none.
        """
        limits = np.array([limits for _, limits in self._limited]).reshape(-1, self.m)
        return limits * (1 + SLACK)

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """For each device the least number of a device that is equal to it: its class."""
        last = np.arange(self.m) == self.last_device
        traits = list(map(tuple, np.vstack([self.capacities, self.ceilings, last]).T))
        return tuple(traits.index(trait) for trait in traits)

    def times(self, assignments: Ints) -> Floats:
        """Time of each device for its partitions and the cuts beside them, shape (b, m).

        Args:
            assignments: (b, n) device of each partition.
        """
        times = self._sums(assignments, self.loads) / self.capacities
        if self.cut_costs.any():
            cost = np.where(assignments[:, 1:] != assignments[:, :-1], self.cut_costs, 0.0)
            times += self._sums(assignments[:, :-1], cost) + self._sums(assignments[:, 1:], cost)
        return times

    def values(self, assignments: Ints) -> Floats:
        """The objective, shape (b,): the makespan (smaller is better) or z of Eq. 5 (larger is).

        Args:
            assignments: (b, n) device of each partition; limits are not checked.
        """
        if self.objective == "profit":
            return np.asarray((self.loads / self.capacities[assignments]).sum(axis=1))
        return np.asarray(self.times(assignments).max(axis=1))

    def feasible(self, assignments: Ints) -> NDArray[np.bool_]:
        """Whether each assignment uses all devices, observes `last_device` and the limits: (b,).

        Whether devices have consecutive partitions is not checked: the solver of chains guarantees
        it.

        Args:
            assignments: (b, n) device of each partition.
        """
        fits = self._sums(assignments, np.ones(self.n)) > 0
        for weights, ceilings in zip(self.weights, self.ceilings):
            fits &= self._sums(assignments, weights) <= ceilings
        if self.last_device is not None:
            fits &= assignments[:, -1:] == self.last_device
        return np.asarray(fits.all(axis=1))

    def costs(self, assignments: Ints) -> Floats:
        """The costs that solvers minimise, shape (b,): makespan or -z; infinite if infeasible.

        Args:
            assignments: (b, n) device of each partition.
        """
        values = self.values(assignments)
        signed = -values if self.objective == "profit" else values
        return np.where(self.feasible(assignments), signed, np.inf)

    @cached_property
    def bound(self) -> float:
        """A lower bound of the cost (see `costs`): an assignment that reaches it is optimal."""
        total = self.loads.sum()
        if self.objective == "profit":
            # if loads were divisible, it would be best to fill the smallest devices first
            sizes = np.sort(self.capacities)
            filled = np.clip(total - (np.cumsum(sizes) - sizes), 0, sizes)
            return -float((filled / sizes).sum())
        cheapest = np.sort(self.cut_costs)[: self.m - 1].sum()  # at least m - 1 cuts, counted twice
        # the larger of two bounds: all work divided evenly, cuts included; and the largest
        # partition alone on the fastest device
        shared = (total + 2 * cheapest * self.capacities.min()) / self.capacities.sum()
        return float(max(shared, self.loads.max() / self.capacities.max()))

    def _sums(self, assignments: Ints, weights: Floats) -> Floats:
        """Add up the weights of the partitions on each device, shape (b, m).

        Args:
            assignments: device of each partition, shape (b, n).
            weights: a number for each partition: shape (n,), equal for all assignments, or shape
                (b, n).
        """
        rows = len(assignments)
        # one `bincount` for all assignments, to avoid a loop in Python
        cells = assignments + self.m * np.arange(rows)[:, None]
        spread = np.broadcast_to(weights, assignments.shape)
        sums = np.bincount(cells.ravel(), spread.ravel(), minlength=rows * self.m)
        return sums.astype(np.float64, copy=False).reshape(rows, self.m)


def numbers(
    name: str, values: Numbers, *, count: int | None = None, positive: bool = False
) -> Floats:
    """Check a list of finite numbers, and convert it to an array.

    Args:
        name: name of the list, for the text of an error.
        values: the numbers.
        count: how many there must be; None: any number.
        positive: whether they must be more than 0; if not, 0 is allowed too.

    Returns:
        The numbers, shape (count,).

    Raises:
        AllocationError: the list has another length, or a number is negative or not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or (count is not None and len(array) != count):
        raise AllocationError(f"{name} has shape {array.shape}, {count or 'n'} numbers are needed")
    low = array <= 0 if positive else array < 0
    wrong = np.flatnonzero(low | ~np.isfinite(array))
    if wrong.size:
        least = "more than 0" if positive else "0 or more"
        raise AllocationError(
            f"{name}[{wrong[0]}] is {array[wrong[0]]}: a finite number of {least} is needed"
        )
    return array
