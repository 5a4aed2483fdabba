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

>>> from lightning_hybrid.allocation import allocate
>>> allocate([1, 1, 1, 1], [3, 3], objective="profit").value == 4 / 3  # like all the others
True
>>> allocate([1, 1, 1, 1], [2, 4], objective="profit").assignment.count(0)  # done after 2/2
2
>>> allocate([1, 1, 1, 1], [2, 4], objective="makespan").assignment.count(0)  # done after 3/4
1

`makespan`, the default, minimises the time of the slowest device, which determines that of a step::

    min max_j ( sum_i x_ij p_i / d_j + sum over cuts i beside j of k_i )

with d_j the relative speed of device j and k_i the cost of cutting between partitions i and i + 1,
charged to the devices on both sides. Memory is a hard limit, not a cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb, factorial
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
    """An allocation problem of n partitions and m devices, made by `make_problem`.

    An assignment is an integer array of shape (n,), the device of each partition; most methods take
    b assignments at once, shape (b, n).

    Attributes:
        loads: (n,) computation of each partition.
        capacities: (m,) speed of each device (`makespan`) or the load it may carry (`profit`).
        cut_costs: (n - 1,) cost of cutting after a partition, for each of the two devices beside
            it.
        weights: (k, n) the k quantities of each partition that are limited: loads (`profit`),
            memory.
        limits: (k, m) limit of each device for each quantity.
        objective: `makespan` (the time of the slowest device is minimised) or `profit` (z of Eq. 5
            is maximised).
        contiguous: whether the partitions of a device must follow each other.
        last_device: device that must hold the last partition; None: any.
        order: the devices in the order of their runs, if that is given; None: any order.
    """

    loads: Floats
    capacities: Floats
    cut_costs: Floats
    weights: Floats
    limits: Floats
    objective: Objective
    contiguous: bool
    last_device: int | None = None
    order: tuple[int, ...] | None = None

    @property
    def n(self) -> int:
        return len(self.loads)

    @property
    def m(self) -> int:
        return len(self.capacities)

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Classes of equal devices: for each device the first one that is equal to it."""
        if self.order is not None:
            return tuple(range(self.m))
        last = np.arange(self.m) == self.last_device
        traits = list(map(tuple, np.vstack([self.capacities, self.limits, last]).T))
        return tuple(traits.index(trait) for trait in traits)

    @cached_property
    def ceilings(self) -> Floats:
        """The limits, with their tolerance for rounding errors."""
        return self.limits * (1 + SLACK)

    def times(self, assignments: Ints) -> Floats:
        """Computation plus cut costs of each device, shape (b, m)."""
        times = self._sums(assignments, self.loads) / self.capacities
        if self.cut_costs.any():
            cost = np.where(assignments[:, 1:] != assignments[:, :-1], self.cut_costs, 0.0)
            times += self._sums(assignments[:, :-1], cost) + self._sums(assignments[:, 1:], cost)
        return times

    def values(self, assignments: Ints) -> Floats:
        """The objective, shape (b,): z of Eq. 5 (larger is better) or the makespan (smaller is)."""
        if self.objective == "profit":
            return np.asarray((self.loads / self.capacities[assignments]).sum(axis=1))
        return np.asarray(self.times(assignments).max(axis=1))

    def feasible(self, assignments: Ints) -> NDArray[np.bool_]:
        """Whether each assignment uses all devices, observes `last_device` and the limits: (b,).

        Contiguity is not checked: the solvers of contiguous problems guarantee it.
        """
        fits = self._sums(assignments, np.ones(self.n)) > 0
        for weights, ceilings in zip(self.weights, self.ceilings):
            fits &= self._sums(assignments, weights) <= ceilings
        if self.last_device is not None:
            fits &= assignments[:, -1:] == self.last_device
        return np.asarray(fits.all(axis=1))

    def costs(self, assignments: Ints) -> Floats:
        """The costs that solvers minimise, shape (b,): makespan or -z; infinite if infeasible."""
        values = self.values(assignments)
        signed = -values if self.objective == "profit" else values
        return np.where(self.feasible(assignments), signed, np.inf)

    @cached_property
    def bound(self) -> float:
        """A lower bound of the cost: an assignment that reaches it is optimal."""
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

    @cached_property
    def size(self) -> int:
        """Number of assignments, whether or not they are within the limits."""
        if self.contiguous:
            orders = factorial(self.m) if self.order is None else 1
            return comb(self.n - 1, self.m - 1) * orders
        return int(self.m**self.n)

    def _sums(self, assignments: Ints, weights: Floats) -> Floats:
        """Sum of the weights on each device, shape (b, m); weights of shape (n,) or (b, n)."""
        rows = len(assignments)
        # one `bincount` for all assignments, to avoid a loop in Python
        cells = assignments + self.m * np.arange(rows)[:, None]
        spread = np.broadcast_to(weights, assignments.shape)
        sums = np.bincount(cells.ravel(), spread.ravel(), minlength=rows * self.m)
        return sums.astype(np.float64, copy=False).reshape(rows, self.m)


def make_problem(
    loads: Numbers,
    capacities: Numbers,
    *,
    cut_costs: Numbers | None = None,
    memory: Numbers | None = None,
    memory_limits: Numbers | None = None,
    objective: Objective = "makespan",
    contiguous: bool = True,
    last_device: int | None = None,
    device_order: Sequence[int] | None = None,
) -> Problem:
    """Check the numbers and make a problem of them; the arguments are those of `allocate`.

    Raises:
        AllocationError: the numbers are wrong, or no assignment can satisfy them.
    """
    p = numbers("loads", loads)
    d = numbers("capacities", capacities, positive=True)
    n, m = len(p), len(d)
    if objective not in ("makespan", "profit"):
        raise AllocationError(f"objective {objective!r} is neither 'makespan' nor 'profit'")
    if m < 1 or n < m:
        raise AllocationError(
            f"{n} partitions cannot give each of {m} devices one: "
            "use fewer devices (stages), or cut the network into more partitions"
        )
    if last_device is not None and not 0 <= last_device < m:
        raise AllocationError(f"last_device({last_device}) is none of the devices 0..{m - 1}")
    if device_order is not None:
        if not contiguous or sorted(device_order) != list(range(m)):
            raise AllocationError(
                f"device_order{tuple(device_order)} must name each of the devices 0..{m - 1} once, "
                "and goes with contiguous=True"
            )
        last_device = device_order[-1]
    cuts = numbers("cut_costs", [0.0] * (n - 1) if cut_costs is None else cut_costs, count=n - 1)
    limits = [("load", p, d)] if objective == "profit" else []
    limits += _memory_limits(memory, memory_limits, n, m)
    for name, needed, ceiling in limits:
        _check_limit(name, needed, ceiling)
    return Problem(
        loads=p,
        capacities=d,
        cut_costs=cuts,
        weights=np.array([needed for _, needed, _ in limits]).reshape(-1, n),
        limits=np.array([ceiling for _, _, ceiling in limits]).reshape(-1, m),
        objective=objective,
        contiguous=contiguous,
        last_device=last_device,
        order=None if device_order is None else tuple(device_order),
    )


def _memory_limits(
    memory: Numbers | None, limits: Numbers | None, n: int, m: int
) -> list[tuple[str, Floats, Floats]]:
    """The limit of memory, if there is one: its name, sizes of partitions, limits of devices."""
    if memory is None and limits is None:
        return []
    if memory is None or limits is None:
        raise AllocationError("memory and memory_limits must be given together")
    needed = numbers("memory", memory, count=n)
    return [("memory", needed, numbers("memory_limits", limits, count=m))]


def numbers(
    name: str, values: Numbers, *, count: int | None = None, positive: bool = False
) -> Floats:
    """Check a list of finite numbers, 0 or more (more than 0 if `positive`), shape (count,)."""
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


def _check_limit(name: str, weights: Floats, limits: Floats) -> None:
    """Refuse partitions that obviously do not fit within the limits of devices."""
    largest = int(weights.argmax())
    if weights[largest] > limits.max() * (1 + SLACK):
        raise AllocationError(
            f"partition {largest} has {name} {weights[largest]:g}, more than any device takes "
            f"({limits.max():g}): cut it further or use a larger device"
        )
    if weights.sum() > limits.sum() * (1 + SLACK):
        raise AllocationError(
            f"the partitions have {name} {weights.sum():g} in all, the devices take "
            f"{limits.sum():g}: use more or larger devices"
        )
    # no device stays empty, so the m smallest partitions must fit, sorted, on the sorted devices
    order, smallest = limits.argsort(), np.sort(weights)[: len(limits)]
    tight = np.flatnonzero(smallest > limits[order] * (1 + SLACK))
    if tight.size:
        device = order[tight[0]]
        raise AllocationError(
            f"device {device} takes {name} {limits[device]:g}, the smallest partition left for it "
            f"has {smallest[tight[0]]:g}, and no device may stay empty: leave this device out, use "
            "a larger one, or cut the network into smaller partitions"
        )
