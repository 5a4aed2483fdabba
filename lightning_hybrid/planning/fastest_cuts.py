"""The default search of cuts: a dynamic programme finds the chain with the shortest step.

The order of the devices is given. (Cuts of least makespan or most profit, the literal allocation
problem, have a programme of their own: `lightning_hybrid.allocation.exact_makespan`.)

A chain has one stage per device. Its step time (see `step_time`) is neither a sum nor a maximum
over its stages, but a function of five numbers that grow as stages are put in front, from the last
one to the first:

    F, f    sum and largest of the forward times and messages
    B, b    the same of the backward
    W       when the last of the stages so far has stepped, counted from the start of the backward

A step takes F + (M - 1) f + W. So the programme keeps, for every number of stages and every first
partition (a *state*), all *labels* (F, f, B, b, W) that may still be the best. Label 1 makes label
2 superfluous if no stages in front of them can make up for the difference ::

    F1 - F2 + (M - 1) max(f1 - f2, 0) + max(W1 - W2, B1 - B2 + (M - 1) max(b1 - b2, 0)) <= 0

and a label is dropped if the least step that it can lead to is longer than that of a known chain.
The known chain is first one with fair shares, then one found by the same programme with few labels
per state. The result is optimal if partitions times devices are at most `_SMALL`. For larger
problems it is the result of the pass with few labels, which need not be optimal.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_hybrid.allocation import Floats, Ints
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.memory_check import gigabytes, least_lacks
from lightning_hybrid.planning.step_problem import StepProblem

_F, _FMAX, _B, _BMAX, _W = range(5)
_FEW = 8
"""Largest number of labels per state in the first, quick pass."""
_BLOCK = 256
"""Number of labels that are compared with each other at once."""
_SMALL = 2_000


def best_chain(problem: StepProblem, order: Sequence[int]) -> tuple[list[int], float]:
    """Cut a network into a chain of stages, one per device, so that a step is as short as possible.

    Args:
        problem: The partitions and devices.
        order: The device of each stage, by index in the replica; each device once.

    Returns:
        For each stage its end, the number after its last partition; and the seconds of a step.

    Raises:
        PlanError: no chain in this order keeps every device within its memory.
    """
    programme = _Programme(problem, order)
    ends = fair_ends(problem, order)
    # the time of a good chain is a limit, above which the full pass drops labels early
    ends = programme.run(programme.time_s(ends), _FEW) or ends
    # the number of labels grows with partitions and devices: large problems have no full pass
    if problem.n * problem.m <= _SMALL:
        ends = programme.run(programme.time_s(ends), None) or ends
    step_s = programme.time_s(ends)
    if step_s == np.inf:
        lacks = least_lacks(problem.table, problem.memory_limits, order)
        worst = max(range(problem.m), key=lacks.__getitem__)
        raise PlanError(
            f"no chain of {problem.m} stages keeps every device within its memory: however it is "
            f"cut, one lacks {gigabytes(lacks[worst])} at least (device {worst} of a replica, with "
            f"{gigabytes(problem.memory_limits[worst])}). Use larger devices, more of them, "
            "smaller micro-batches, or recomputation"
        )
    return ends, step_s


def fair_ends(problem: StepProblem, devices: Sequence[int]) -> list[int]:
    """Cut a network so that each stage gets work in proportion to its device's speed.

    Memory and messages are not considered. It is a start for searches.

    Args:
        problem: The partitions and devices.
        devices: The device of each stage, by index in the replica; a device may occur several
            times. There must be no more stages than partitions.

    Returns:
        For each stage its end, the number after its last partition.
    """
    share = np.cumsum([problem.speeds[device] for device in devices])
    work = np.cumsum([0.0, *problem.table.loads])
    wanted = np.searchsorted(work, share / share[-1] * work[-1])
    steps = np.arange(len(devices))  # with these each stage gets at least one partition
    ends = np.maximum.accumulate(np.maximum(wanted, 1) - steps) + steps
    return [*np.minimum(ends, problem.n - steps[::-1])[:-1].tolist(), problem.n]


class _Programme:
    """The dynamic programme of one problem: its tables, and passes that search below a time limit.

    Args:
        problem: The partitions and devices.
        order: The device of each stage, by index in the replica.
    """

    def __init__(self, problem: StepProblem, order: Sequence[int]) -> None:
        self.problem = problem
        self.order = list(order)
        self.more = problem.microbatches - 1
        sums = {name: np.asarray(values) for name, values in problem.table.sums.items()}
        self.forward = sums["forward_s"]
        self.backward = sums["backward_s"]
        self.reduce = sums["reduce_s"]
        self.step = sums["step_s"]
        self.held = self._held(sums["memory_bytes"]) if problem.ceilings else None
        self.fronts = self._fronts()

    def _held(self, memory: Floats) -> Floats:
        """Bytes of every possible stage, shape (n + 1, n + 1).

        Row a and column b stand for a stage of partitions a .. b - 1. Copies of weights that an
        earlier stage owns are included.

        Args:
            memory: (n + 1,) prefix sums of the partitions' bytes.
        """
        held: Floats = memory[None, :] - memory[:, None]
        for weight in self.problem.table.tied:
            for before, use in pairwise(weight.partitions):
                held[before + 1 : use + 1, use + 1 :] += weight.copy_bytes
        return held

    def _fronts(self) -> list[Floats]:
        """For each stage lower bounds of what the stages in front of it take, shape (4, n + 1).

        Column i is for stages in front that hold partitions 0 .. i - 1. The rows are the least sum
        of their forward times and messages, the least possible largest of these, and the same two
        of the backward, all in seconds. Each bound is minimised by itself, so that no single chain
        need reach all four.
        """
        n, m = self.problem.n, self.problem.m
        nothing = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
        fronts = [np.stack([nothing] * 4)]
        for stage in range(m - 1):
            device, target = self.order[stage], self.order[stage + 1]
            sizes = np.asarray([0.0, *self.problem.table.cut_bytes, 0.0])
            send = sizes * self.problem.links.seconds_per_byte[device][target]
            latency = self.problem.links.latency_s[device][target]
            possible = np.triu(np.ones((n + 1, n + 1), dtype=bool), 1)
            if self.held is not None:
                possible &= self.held <= self.problem.ceilings[device]
            rows = []
            for sums, (total, largest) in (
                (self.forward, fronts[-1][:2]),
                (self.backward, fronts[-1][2:]),
            ):
                run = (sums[None, :] - sums[:, None]) / self.problem.speeds[device]
                run = np.where(possible, run, np.inf)
                rows.append((total[:, None] + run).min(axis=0) + send + latency)
                slowest = np.maximum(run, send[None, :])
                rows.append(np.maximum(largest[:, None], slowest).min(axis=0))
            fronts.append(np.stack(rows))
        return fronts

    def time_s(self, ends: Sequence[int]) -> float:
        return self.problem.step_time_s(ends, self.order)

    def run(self, limit_s: float, most: int | None) -> list[int] | None:
        """Search for the chain with the shortest step, if that is less than `limit_s` seconds.

        Args:
            limit_s: The time that the chain must beat.
            most: Most labels that are kept per state; None: all that are not superfluous.

        Returns:
            For each stage the number after its last partition; None: no such chain was found.
        """
        n, m = self.problem.n, self.problem.m
        furthest = [self._furthest(device) for device in self.order]
        # labels[i]: labels of the chains from the current stage on that begin with partition i
        labels: dict[int, Floats] = {n: np.zeros((1, 5))}
        trace: list[dict[int, tuple[Ints, Ints]]] = []  # per state, where each label came from
        for stage in range(m - 1, -1, -1):
            reached: dict[int, Floats] = {}
            sources: dict[int, tuple[Ints, Ints]] = {}
            # leave at least one partition for each of the other stages
            starts = [0] if stage == 0 else range(stage, n - (m - 1 - stage))
            for start in starts:
                ends = [e for e in labels if start < e <= furthest[stage][start]]
                if not ends:
                    continue
                found = self._state(stage, start, ends, labels, limit_s, most)
                if found is not None:
                    reached[start], *came_from = found
                    sources[start] = came_from[0], came_from[1]
            labels = reached
            trace.append(sources)
        if 0 not in labels:
            return None
        index = int(np.argmin(self._least_s(0, 0, labels[0])))
        ends, start = [], 0
        for sources in reversed(trace):
            end, before = sources[start]
            start, index = int(end[index]), int(before[index])
            ends.append(start)
        return ends

    def _furthest(self, device: int) -> Ints:
        """For each first partition of a stage, the largest end that the device's memory allows.

        An end is the number after the stage's last partition.

        Args:
            device: The device, by index in the replica.

        Returns:
            The ends by number of the first partition, shape (n + 1,).
        """
        if self.held is None:
            return np.full(self.problem.n + 1, self.problem.n)
        return np.asarray((self.held <= self.problem.ceilings[device]).sum(axis=1) - 1)

    def _state(
        self,
        stage: int,
        start: int,
        ends: list[int],
        after: dict[int, Floats],
        limit_s: float,
        most: int | None,
    ) -> tuple[Floats, Ints, Ints] | None:
        """Find the labels of one state: stages from `stage` on, beginning with partition `start`.

        A label has the five numbers F, f, B, b, W of the module for one choice of these stages.

        Args:
            stage: Number of the first of these stages.
            start: Number of its first partition.
            ends: The ends that this stage may have.
            after: By end, the labels of the stages behind it.
            limit_s: Labels that cannot lead to a step below this many seconds are dropped.
            most: Most labels to keep; None: all that are not superfluous.

        Returns:
            The labels, shape (k, 5); for each label the end of stage `stage`, shape (k,); and for
            each label the index, in `after[end]`, of the label that it extends, shape (k,). None:
            no label is left.
        """
        counts = [len(after[end]) for end in ends]
        end = np.repeat(np.asarray(ends), counts)
        before = np.concatenate([np.arange(count) for count in counts])
        labels = self._extended(stage, start, end, np.concatenate([after[e] for e in ends]))
        least = self._least_s(stage, start, labels)
        # a chain must be shorter by more than rounding errors
        kept = np.flatnonzero(least < limit_s * (1 - 1e-12))
        if not kept.size:
            return None
        kept = kept[np.argsort(least[kept], kind="stable")]
        if most is not None:
            kept = kept[:most]
        else:
            kept = kept[_undominated(labels[kept], self.more)]
        return labels[kept], end[kept], before[kept]

    def _extended(self, stage: int, start: int, end: Ints, labels: Floats) -> Floats:
        """Extend labels by a stage in front of their stages.

        Args:
            stage: Number of the stage.
            start: Number of its first partition.
            end: By label, the number after its last partition.
            labels: Labels of the stages behind it; a row has the numbers F, f, B, b, W of the
                module.

        Returns:
            The extended labels, in the same order.
        """
        problem, device = self.problem, self.order[stage]
        speed, last = problem.speeds[device], stage == problem.m - 1
        f = (self.forward[end] - self.forward[start]) / speed
        b = (self.backward[end] - self.backward[start]) / speed
        send = latency = np.zeros(len(end))
        if not last:
            target = self.order[stage + 1]
            sizes = np.asarray([*problem.table.cut_bytes, 0.0])
            send = sizes[end - 1] * problem.links.seconds_per_byte[device][target]
            latency = np.full(len(end), problem.links.latency_s[device][target])
        result = np.empty_like(labels)
        result[:, _F] = labels[:, _F] + f + send + latency
        result[:, _FMAX] = np.maximum(labels[:, _FMAX], np.maximum(f, send))
        result[:, _B] = labels[:, _B] + b + send + latency
        result[:, _BMAX] = np.maximum(labels[:, _BMAX], np.maximum(b, send))
        done = result[:, _B] + self.more * result[:, _BMAX]
        reduced = done - b + self.reduce[end] - self.reduce[start]
        stepped = np.maximum(done, reduced) + (self.step[end] - self.step[start]) / speed
        for weight in problem.table.tied:
            inside = np.searchsorted(weight.partitions, end)
            inside -= np.searchsorted(weight.partitions, start)
            shared = (inside > 0) & (inside < len(weight.partitions))
            stepped = stepped + shared * problem.lending_s(weight, device)
        result[:, _W] = np.maximum(labels[:, _W], stepped)
        return result

    def _least_s(self, stage: int, start: int, labels: Floats) -> Floats:
        """For each label of a state, a lower bound in seconds of the step that it can lead to.

        For stage 0, which has no stages in front, it is the time of the step itself.

        Args:
            stage: Number of the first stage that the labels include.
            start: Number of its first partition.
            labels: Labels; a row has the numbers F, f, B, b, W of the module.
        """
        total, largest, total_back, largest_back = self.fronts[stage][:, start]
        if not np.isfinite(total):  # no chain reaches this state
            return np.full(len(labels), np.inf)
        forward = labels[:, _F] + total + self.more * np.maximum(labels[:, _FMAX], largest)
        back = labels[:, _B] + total_back + self.more * np.maximum(labels[:, _BMAX], largest_back)
        finish = np.maximum(labels[:, _W], back) if stage else labels[:, _W]
        return np.asarray(forward + finish)


def _undominated(labels: Floats, more: int) -> Ints:
    """Find the labels that no other label makes superfluous; of equal labels the first one stays.

    Labels are compared block by block: with those kept of earlier blocks, then with each other.

    Args:
        labels: Labels, the most promising ones first; a row has the numbers F, f, B, b, W of the
            module.
        more: Number of micro-batches, less one.

    Returns:
        The indices of these labels, rising.
    """
    kept = np.empty(0, dtype=np.int64)
    for first in range(0, len(labels), _BLOCK):
        block = np.arange(first, min(first + _BLOCK, len(labels)))
        if kept.size:
            block = block[~_beaten(labels[block], labels[kept], more).any(axis=1)]
        beaten = _beaten(labels[block], labels[block], more)
        mutual = beaten & beaten.T  # equal labels beat each other: the first one stays
        beaten &= ~(mutual & (np.arange(len(block))[:, None] <= np.arange(len(block))))
        kept = np.concatenate([kept, block[~beaten.any(axis=1)]])
    return kept


def _beaten(labels: Floats, by: Floats, more: int) -> NDArray[np.bool_]:
    """Matrix of booleans: whether label i (row) is made superfluous by label j of `by` (column).

    The module says when a label makes another one superfluous.

    Args:
        labels: Labels; a row has the numbers F, f, B, b, W of the module.
        by: Labels that they are compared with, in the same form.
        more: Number of micro-batches, less one.
    """
    d = by[None, :, :] - labels[:, None, :]
    forward = d[..., _F] + more * np.maximum(d[..., _FMAX], 0.0)
    backward = d[..., _B] + more * np.maximum(d[..., _BMAX], 0.0)
    return np.asarray(forward + np.maximum(d[..., _W], backward) <= 0.0)
