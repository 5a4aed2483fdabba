"""Where to cut a network whose stages have so many copies each, by the simulated step.

No closed form and no dynamic programme knows the step of dealt micro-batches. Where there are few
ways to cut, all are tried; else one cut after the other is improved, from fair shares of the work.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from math import comb

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.chains import fair_ends
from lightning_hybrid.planning.dealt_time import dealt_s
from lightning_hybrid.planning.looped_placements import improved
from lightning_hybrid.planning.simulate import DealtCosts, Edge
from lightning_hybrid.planning.step_problem import Links, StepProblem
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import StageCopy

_MOST_CUTS = 100
"""Sets of cuts that are all tried."""

Owners = tuple[tuple[int, ...], ...]
AfterBackward = Sequence[tuple[Sequence[float], Sequence[float]]]


def owners_of(copies: Sequence[int]) -> Owners:
    """The devices of a replica that have each stage; the last copy is on 0, the driver's."""
    ends = [*accumulate(copies, initial=1)]
    *stages, last = (tuple(range(a, b)) for a, b in pairwise(ends))
    return (*stages, (*last[:-1], 0))


def of_slowest(values: Sequence[float], owners: Owners) -> list[float]:
    """From numbers of all devices the least of each stage's, with the driver's stage first.

    So are the devices of a chain numbered whose stages have one copy.
    """
    least = [min(values[device] for device in devices) for devices in owners]
    return [least[-1], *least[:-1]]


@dataclass(frozen=True, kw_only=True)
class CopiedStages:
    """n network partitions in a row, and S stages with copies to cut them into.

    Attributes:
        chain: the same for single copies; its speeds and limits are those of the least of a stage's
            devices. Each copy is taken to hold all micro-batches.
        copies: of each stage.
        speeds: of all devices of a replica, as `owners_of` numbers them.
        links: between all of them.
        after: by stage, for each partition the seconds of its all-reduce over the copies of the
            stage in all replicas, and of its optimizer step; empty: as in the table of the chain.
    """

    chain: StepProblem
    copies: tuple[int, ...]
    speeds: Sequence[float]
    links: Links
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
        """What the slowest copy of each stage takes."""
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
        """What each copy takes: they differ in speed and links, not in what they compute."""
        slowest = self.stage_costs(ends)

        def each(seconds: Sequence[float]) -> list[list[float]]:
            """Work that the slowest of a stage does in so many seconds, by copy."""
            found = []
            for value, devices in zip(seconds, owners_of(self.copies)):
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
        """Seconds in which the driver receives the weights of the last stage."""
        first = owners_of(self.copies)[-1][0]
        size = sum(self.chain.table.gradient_bytes[ends[-2] :])
        return size * self.links.seconds_per_byte[first][0] + self.links.latency_s[first][0]

    def _edges(self, ends: Sequence[int]) -> dict[Edge, tuple[float, float]]:
        owners = owners_of(self.copies)
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
        """Predicted seconds of a step; infinite where stages cannot be so.

        They cannot where a device is too small for its stage, or where a stage that has copies
        shares a weight with another one.
        """
        for weight in self.chain.table.tied:
            stages = {bisect_right(ends, partition) for partition in weight.partitions}
            if len(stages) > 1 and max(self.copies[stage] for stage in stages) > 1:
                return float("inf")
        if not self.chain.fits(ends, [*range(1, self.chain.m), 0]):
            return float("inf")
        return dealt_s(self.costs(ends), self.chain.microbatches)


def best_cuts(problem: CopiedStages) -> tuple[list[int], bool]:
    """The cuts of least simulated step.

    Returns:
        For each stage the number after its last partition, and whether all cuts were tried.

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
