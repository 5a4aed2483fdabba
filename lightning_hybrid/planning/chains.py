"""The chain of least step time where the order of the devices is given: a dynamic programme.

The step of a chain (see `step_time`) is not a sum and not a maximum over its stages, but built of
five numbers that grow as stages are put in front, from the last one to the first:

    F, f    sum and largest of the forward times and messages
    B, b    the same backwards
    W       when the last of the stages so far has stepped, counted from the start of the backward

A step takes F + (M - 1) f + W. So the programme keeps, for every number of stages and every first
partition, all labels (F, f, B, b, W) that may still be the best. Label 1 makes label 2 superfluous
if no stages in front of them can make up for the difference ::

    F1 - F2 + (M - 1) max(f1 - f2, 0) + max(W1 - W2, B1 - B2 + (M - 1) max(b1 - b2, 0)) <= 0

and any label whose least possible step is above that of a chain known already is dropped: first one
with fair shares, then one found by the same programme with few labels per state. The answer is
optimal; of problems with more than `_SMALL` partitions times devices it is that of the pass with
few labels, without a proof.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_hybrid.allocation import SLACK, Floats, Ints
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.memory_check import gigabytes, least_lacks
from lightning_hybrid.planning.step_problem import StepProblem

_F, _FMAX, _B, _BMAX, _W = range(5)
_FEW = 8
"""Labels per state of the first, quick pass."""
_BLOCK = 256
"""Labels that are compared with each other at once."""
_SMALL = 2_000


def best_chain(problem: StepProblem, order: Sequence[int]) -> tuple[list[int], float]:
    """Cut a chain so that a step is as short as possible.

    Args:
        problem: What to place.
        order: The device of each stage; each device once.

    Returns:
        For each stage the number after its last partition, and the seconds of a step.

    Raises:
        PlanError: no chain in this order keeps every device within its memory.
    """
    if sorted(order) != list(range(problem.m)):
        raise PlanError(f"order{tuple(order)} must name each of the {problem.m} devices once")
    programme = _Programme(problem, order)
    ends = fair_ends(problem, order)
    # a good chain first: what cannot beat it is never extended in the full pass
    ends = programme.run(programme.time_s(ends), _FEW) or ends
    # labels multiply with partitions and with devices; above this the quick pass must do
    if problem.n * problem.m <= _SMALL:
        ends = programme.run(programme.time_s(ends), None) or ends
    step_s = programme.time_s(ends)
    if step_s == np.inf:
        lacks = least_lacks(problem.table.memory_bytes, problem.memory_limits, order)
        worst = max(range(problem.m), key=lacks.__getitem__)
        raise PlanError(
            f"no chain of {problem.m} stages keeps every device within its memory: however it is "
            f"cut, one lacks {gigabytes(lacks[worst])} at least (device {worst} of a replica, with "
            f"{gigabytes(problem.memory_limits[worst])}). Use larger devices, more of them, "
            "smaller micro-batches, or recomputation"
        )
    return ends, step_s


def fair_ends(problem: StepProblem, devices: Sequence[int]) -> list[int]:
    """Ends that give every stage about its share of the work; memory is not looked at.

    Args:
        problem: What to place.
        devices: Of each stage.

    Returns:
        For each stage the number after its last partition.
    """
    share = np.cumsum([problem.speeds[device] for device in devices])
    work = np.cumsum([0.0, *problem.table.loads])
    wanted = np.searchsorted(work, share / share[-1] * work[-1])
    steps = np.arange(len(devices))  # a partition at least for each stage
    ends = np.maximum.accumulate(np.maximum(wanted, 1) - steps) + steps
    return [*np.minimum(ends, problem.n - steps[::-1])[:-1].tolist(), problem.n]


class _Programme:
    """The dynamic programme of one problem: its tables, and passes below a limit over them."""

    def __init__(self, problem: StepProblem, order: Sequence[int]) -> None:
        self.problem, self.order = problem, list(order)
        self.more = problem.microbatches - 1
        sums = {name: np.asarray(values) for name, values in problem.table.sums.items()}
        self.forward, self.backward = sums["forward_s"], sums["backward_s"]
        self.reduce, self.step = sums["reduce_s"], sums["step_s"]
        self.memory = sums["memory_bytes"] if problem.ceilings else None
        self.fronts = self._fronts()

    def _fronts(self) -> list[Floats]:
        """Per stage what the stages in front of it take at least, shape (4, n + 1).

        Row by row, for the partitions before a number: the least sum of forward times and messages,
        the least possible largest of them, and both backwards. Each is the least by itself, found
        by a dynamic programme of one number; no chain needs to have all four at once.
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
            if self.memory is not None:
                held = self.memory[None, :] - self.memory[:, None]
                possible &= held <= self.problem.ceilings[device]
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
        """The ends of the best chain below a limit, or None; with at most `most` labels a state."""
        n, m = self.problem.n, self.problem.m
        furthest = self._furthest(limit_s)
        # labels[i]: of the stages from the present one on, beginning with partition i
        labels: dict[int, Floats] = {n: np.zeros((1, 5))}
        trace: list[dict[int, tuple[Ints, Ints]]] = []  # per state where each label came from
        for stage in range(m - 1, -1, -1):
            reached: dict[int, Floats] = {}
            sources: dict[int, tuple[Ints, Ints]] = {}
            # partitions for each of the stages in front, and at least one for this
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

    def _furthest(self, limit_s: float) -> list[Ints]:
        """Per stage and first partition how far it may reach: by its memory, and by a limit.

        The sums and the largest backward time of all stages are at least those of the whole chain,
        and what is then left of the limit goes to the M - 1 other micro-batches of the stage.
        """
        total, _, back, slowest = self._fronts_of_all()
        if not np.isfinite(total):  # nothing fits
            return [np.zeros(self.problem.n + 1, dtype=np.int64)] * self.problem.m
        left_s = limit_s - total - back - self.more * slowest
        longest_s = left_s / self.more if self.more else np.inf
        furthest = []
        for device in self.order:
            top = self.forward + longest_s * self.problem.speeds[device] * (1 + SLACK)
            reach = np.searchsorted(self.forward, top, side="right") - 1
            if self.memory is not None:
                held = self.memory + self.problem.ceilings[device]
                reach = np.minimum(reach, np.searchsorted(self.memory, held, side="right") - 1)
            furthest.append(reach)
        return furthest

    def _fronts_of_all(self) -> Floats:
        """The least sums and largest times of a whole chain, see `_fronts`."""
        n, m = self.problem.n, self.problem.m
        speed = self.problem.speeds[self.order[-1]]
        total, largest, total_back, largest_back = self.fronts[m - 1]
        f = (self.forward[n] - self.forward) / speed
        b = (self.backward[n] - self.backward) / speed
        rows = (
            total + f,
            np.maximum(largest, f),
            total_back + b,
            np.maximum(largest_back, b),
        )
        return np.array([row[:n].min() for row in rows])

    def _state(
        self,
        stage: int,
        start: int,
        ends: list[int],
        after: dict[int, Floats],
        limit_s: float,
        most: int | None,
    ) -> tuple[Floats, Ints, Ints] | None:
        """The labels of one state, with the end of its stage and the number of the label there."""
        counts = [len(after[end]) for end in ends]
        end = np.repeat(np.asarray(ends), counts)
        before = np.concatenate([np.arange(count) for count in counts])
        labels = self._extended(stage, start, end, np.concatenate([after[e] for e in ends]))
        least = self._least_s(stage, start, labels)
        # rounding must not make a chain of the same time look like a better one
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
        """The labels with this stage in front, which holds the partitions start .. end - 1."""
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
        result[:, _W] = np.maximum(labels[:, _W], stepped)
        return result

    def _least_s(self, stage: int, start: int, labels: Floats) -> Floats:
        """A time below which no chain that ends with these stages can lie; exact for stage 0."""
        total, largest, total_back, largest_back = self.fronts[stage][:, start]
        if not np.isfinite(total):  # no chain reaches this state
            return np.full(len(labels), np.inf)
        forward = labels[:, _F] + total + self.more * np.maximum(labels[:, _FMAX], largest)
        back = labels[:, _B] + total_back + self.more * np.maximum(labels[:, _BMAX], largest_back)
        finish = np.maximum(labels[:, _W], back) if stage else labels[:, _W]
        return np.asarray(forward + finish)


def _undominated(labels: Floats, more: int) -> Ints:
    """Numbers of the labels that no other one makes superfluous; of equal ones the first stays.

    In blocks: each is compared with what is left of those before it, and within itself.
    """
    kept = np.empty(0, dtype=np.int64)
    for first in range(0, len(labels), _BLOCK):
        block = np.arange(first, min(first + _BLOCK, len(labels)))
        if kept.size:
            block = block[~_beaten(labels[block], labels[kept], more).any(axis=1)]
        beaten = _beaten(labels[block], labels[block], more)
        mutual = beaten & beaten.T  # equals beat each other: the one in front stays
        beaten &= ~(mutual & (np.arange(len(block))[:, None] <= np.arange(len(block))))
        kept = np.concatenate([kept, block[~beaten.any(axis=1)]])
    return kept


def _beaten(labels: Floats, by: Floats, more: int) -> NDArray[np.bool_]:
    """Whether label i (row) is made superfluous by label j (column)."""
    d = by[None, :, :] - labels[:, None, :]
    forward = d[..., _F] + more * np.maximum(d[..., _FMAX], 0.0)
    backward = d[..., _B] + more * np.maximum(d[..., _BMAX], 0.0)
    return np.asarray(forward + np.maximum(d[..., _W], backward) <= 0.0)
