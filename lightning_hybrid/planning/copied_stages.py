"""Cut a network whose stages have given numbers of copies, by the simulated time of a step.

Copies of a stage take the micro-batches of a replica in turn. No closed form and no dynamic
programme knows the time of such a step. If there are few ways to cut, all are tried; else the
search begins with fair shares of the work and improves one cut after the other.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from math import comb

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.dealt_time import dealt_s
from lightning_hybrid.planning.fastest_cuts import fair_ends
from lightning_hybrid.planning.looped_placements import improved
from lightning_hybrid.planning.simulate import DealtCosts, Edge
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import StageCopy

_MOST_CUTS = 100
"""Largest number of ways to cut for which all of them are tried."""

DevicesOfCopies = tuple[tuple[int, ...], ...]
AfterBackward = Sequence[tuple[Sequence[float], Sequence[float]]]


def devices_of_copies(copies: Sequence[int]) -> DevicesOfCopies:
    """Number the devices of a replica whose stages have copies.

    The first copy of stage 0 is on device 1, the next copies follow; the last copy of the last
    stage is on device 0, the driver's. Copies (2, 1) give ((1, 2), (0,)).

    Args:
        copies: by stage, its number of copies.

    Returns:
        By stage, the devices of its copies, by index in the replica.
    """
    ends = [*accumulate(copies, initial=1)]
    *stages, last = (tuple(range(a, b)) for a, b in pairwise(ends))
    return (*stages, (*last[:-1], 0))


def of_slowest(values: Sequence[float], owners: DevicesOfCopies) -> list[float]:
    """Take for each stage the least value of the devices that have its copies.

    Args:
        values: a number for each device of a replica, such as its speed or memory.
        owners: by stage, the devices of its copies, from `devices_of_copies`.

    Returns:
        One value per stage, that of the last stage (the driver's) first: the order in which a chain
        without copies numbers its devices.
    """
    least = [min(values[device] for device in devices) for devices in owners]
    return [least[-1], *least[:-1]]


@dataclass(frozen=True, kw_only=True)
class CopiedStages:
    """n network partitions in a row, and S stages with copies to cut them into.

    Attributes:
        chain: the same problem with one copy per stage. For each stage it has the least speed and
            memory of the stage's devices. Each copy is taken to hold all micro-batches.
        copies: by stage, its number of copies.
        speeds: speeds of all devices of a replica, which `devices_of_copies` numbers.
        links: links between all devices of a replica.
        after: by stage, for each of the n partitions the seconds of its all-reduce over the copies
            of the stage in all replicas, and those of its optimizer step; empty: as in the table of
            `chain`.

    Raises:
        PlanError: the number of stages or of speeds does not agree with `copies`.
    """

    chain: StepProblem
    copies: tuple[int, ...]
    speeds: Sequence[float]
    links: LinkCosts
    after: AfterBackward = ()

    def __post_init__(self) -> None:
        if len(self.copies) != self.chain.m:
            raise PlanError(f"copies{self.copies} must be one for each of stages({self.chain.m})")
        if len(self.speeds) != sum(self.copies):
            raise PlanError(
                f"copies{self.copies} need speeds of {sum(self.copies)} devices, there "
                f"are {len(self.speeds)}"
            )

    def stage_costs(self, ends: Sequence[int]) -> StepCosts:
        """By stage, the times of its slowest copy, as those of a chain with a device per stage.

        Args:
            ends: for each stage the number after its last partition.
        """
        devices = [*range(1, self.chain.m), 0]
        costs = self.chain.costs(ends, devices)
        if not self.after:
            return costs
        bounds = list(zip(pairwise((0, *ends)), self.after))
        reduce_s, step_s = (
            [sum(after[which][a:b]) for (a, b), after in bounds] for which in (0, 1)
        )
        # as in a chain, the step is the device's and the all-reduce is not
        step_s = [s / self.chain.speeds[d] for s, d in zip(step_s, devices)]
        lent_s = self.chain.with_lending(step_s, ends, devices)
        return replace(costs, reduce_s=reduce_s, step_s=lent_s)

    def costs(self, ends: Sequence[int]) -> DealtCosts:
        """By stage and copy, the times of the copy.

        Copies of a stage differ in speed and links, not in what they compute.

        Args:
            ends: for each stage the number after its last partition.
        """
        slowest = self.stage_costs(ends)

        def each(seconds: Sequence[float]) -> list[list[float]]:
            """By stage and copy, the time of work that takes the slowest copy `seconds`."""
            found = []
            for value, devices in zip(seconds, devices_of_copies(self.copies)):
                least = min(self.speeds[device] for device in devices)
                found.append([value * least / self.speeds[device] for device in devices])
            return found

        step_s = each(slowest.step_s)
        if self.copies[-1] > 1:
            # the driver steps nothing: before the next forward the first worker gives it weights
            step_s[-1][-1] = step_s[-1][0] + self._weights_s(ends)
        return DealtCosts(
            forward_s=each(slowest.forward_s),
            backward_s=each(slowest.backward_s),
            weight_s=each(slowest.weight_s),
            step_s=step_s,
            reduce_s=slowest.reduce_s,
            edges=self._edges(ends),
        )

    def _weights_s(self, ends: Sequence[int]) -> float:
        """Seconds in which the driver receives the weights of the last stage, if it has copies.

        The stage's first copy, which steps the optimizer, sends them once per step.

        Args:
            ends: for each stage the number after its last partition.
        """
        first = devices_of_copies(self.copies)[-1][0]
        size = sum(self.chain.table.gradient_bytes[ends[-2] :])
        return size * self.links.seconds_per_byte[first][0] + self.links.latency_s[first][0]

    def _edges(self, ends: Sequence[int]) -> dict[Edge, tuple[float, float]]:
        owners = devices_of_copies(self.copies)
        table = self.chain.table
        links = self.links
        sizes = [table.cut_bytes[end - 1] for end in ends[:-1]]
        edges = {}
        for stage, (size, (here, there)) in enumerate(zip(sizes, pairwise(owners))):
            for i, source in enumerate(here):
                for j, target in enumerate(there):
                    edges[StageCopy(stage, i), StageCopy(stage + 1, j)] = (
                        size * links.seconds_per_byte[source][target],
                        links.latency_s[source][target],
                    )
        # the outputs of the other copies of the last stage go to the driver
        for i, source in enumerate(owners[-1][:-1]):
            edges[StageCopy(len(owners) - 1, i), StageCopy(len(owners), 0)] = (
                table.output_bytes * links.seconds_per_byte[source][0],
                links.latency_s[source][0],
            )
        return edges

    def step_time_s(self, ends: Sequence[int]) -> float:
        """Predicted seconds of a step; infinite if the cuts are not possible.

        Cuts are not possible if a device has too little memory for its stage, or if a stage with
        several copies shares a weight with another stage.

        Args:
            ends: for each stage the number after its last partition.
        """
        for weight in self.chain.table.tied:
            stages = {bisect_right(ends, partition) for partition in weight.partitions}
            if len(stages) > 1 and max(self.copies[stage] for stage in stages) > 1:
                return float("inf")
        if not self.chain.fits(ends, [*range(1, self.chain.m), 0]):
            return float("inf")
        return dealt_s(self.costs(ends), self.chain.microbatches)


def best_cuts(problem: CopiedStages) -> tuple[list[int], bool]:
    """Search for the cuts with the shortest simulated step.

    Returns:
        For each stage the number after its last partition; and whether all cuts were tried, so that
        these are the best.

    Raises:
        PlanError: no cuts were found with which every stage fits into memory.
    """
    chain, n = problem.chain, problem.chain.n
    all_tried = comb(n - 1, chain.m - 1) <= _MOST_CUTS
    if all_tried:
        found = [[*cuts, n] for cuts in combinations(range(1, n), chain.m - 1)]
    else:
        # a stage works at the speed of all its copies; without them is another start
        order = [*range(1, chain.m), 0]
        together = [chain.speeds[d] * problem.copies[d - 1] for d in range(chain.m)]
        starts = [fair_ends(replace(chain, speeds=s), order) for s in (together, chain.speeds)]
        found = [improved(ends, problem.step_time_s) for ends in starts]
    ends = min(found, key=problem.step_time_s)
    if problem.step_time_s(ends) == float("inf"):
        tied = " and share no weight with another" if chain.table.tied else ""
        raise PlanError(
            f"no cuts were found with which stages with copies{problem.copies} fit into "
            f"{[*chain.memory_limits]} bytes (the driver's first){tied}: use larger devices, more "
            "stages or smaller micro-batches"
        )
    return ends, all_tried
