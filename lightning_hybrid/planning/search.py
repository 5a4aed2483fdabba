"""Make a plan from a table of the partitions: choose the cuts and predict the step time."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Literal

import numpy as np

from lightning_hybrid.allocation import Breeding, Problem, allocate, evolve, merge
from lightning_hybrid.errors import AllocationError, PlanError
from lightning_hybrid.planning.copied_stages import (
    AfterBackward,
    CopiedStages,
    best_cuts,
    devices_of_copies,
    of_slowest,
)
from lightning_hybrid.planning.dealt_time import dealt_s
from lightning_hybrid.planning.fastest_cuts import best_chain
from lightning_hybrid.planning.free_placements import FreePlacements, runs
from lightning_hybrid.planning.looped_placements import best_loop
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.split_backwards import (
    best_split_chain,
    inside_s,
    split_costs,
    split_costs_inside,
)
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem
from lightning_hybrid.planning.step_time import StepCosts, batch_s, fill_drain_s
from lightning_hybrid.schedules import INSIDE, STREAMED, DelayedWeights, loop_order

PlanObjective = Literal["step", "makespan", "profit"]
Method = Literal["gabra", "exact", "merging"]
AUTO = "auto"

_MOST_CALLS = 5_000
"""Largest number of step times that the search for a free placement computes."""

_STREAM = 64
"""Number of micro-batches with which cuts for streamed schedules are searched. A stream of batches
is as fast as its slowest stage, and so is fill-drain with many micro-batches."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Options of the user for plans.

    Attributes:
        schedule: name of the schedule, or ``"auto"``.
        allocation: how the cuts are chosen, ``"gabra"``, ``"exact"`` or ``"merging"``; or cut
            points as named in the LightningModule. `merging` has a rule of its own and no
            objective, and takes the devices to be equal; see `allocation.merging`.
        objective: what the search optimises. `step`: the predicted step time. Contiguous stages are
            then cut by a dynamic programme, under `gabra` and `exact` alike (the plan says so), and
            free placements are searched by `gabra`, unless the best chain is as fast. `makespan`:
            the time of the slowest device for a micro-batch and its messages. `profit`: Eq. 5 of
            Akintoye et al. 2022. It needs capacities as limits of work, which profiled devices do
            not have: speeds are scaled so that they hold the network with a quarter to spare.
        seed: seed of the genetic algorithm.
        contiguous: whether each device gets consecutive partitions, which form one stage. If not, a
            device may get several runs of consecutive partitions, and each run is a stage.
        recompute: whether activations are recomputed; ``"auto"``: if nothing else fits, or if it is
            faster.
        compiled: whether stages are compiled; then backwards cannot be split.
        delayed_weights: weights of the backward under a delayed schedule; see `DelayedWeights`.
        shards_states: whether replicas divide the optimizer state.
        copies: number of copies of each stage; empty: each has one.
        may_go_inside: whether backwards may run inside of the network's calls (schedule `1f1b`), if
            the network allows it.
    """

    schedule: str = "gpipe"
    allocation: Method | tuple[str, ...] = "gabra"
    objective: PlanObjective = "step"
    seed: int = 0
    contiguous: bool = True
    recompute: bool | Literal["auto"] = "auto"
    compiled: bool = False
    delayed_weights: DelayedWeights = "stash"
    shards_states: bool = False
    copies: tuple[int, ...] = ()
    may_go_inside: bool = True

    @property
    def has_copies(self) -> bool:
        """Whether any stage has several copies."""
        return max(self.copies, default=1) > 1


@dataclass(frozen=True, kw_only=True)
class Replica:
    """The devices of a replica, as the search takes them.

    Attributes:
        replicas: number of replicas, which are all alike.
        stages: number of devices of a replica; each has one stage if `PlanSettings.contiguous`. If
            stages have copies, number of stages.
        microbatches: number of micro-batches.
        capacities: relative speeds of the devices, by index in the replica; None: all equal. Device
            0 is the driver's and gets the last stage.
        bandwidth_bytes_per_s: bandwidth of the links between the devices.
        latency_s: latency of these links.
        links: the links of a chain, if they differ; None: they are equal, as above.
        memory_limits: bytes that each device may hold, by its index; None: no limit. If stages have
            copies, one limit for each stage, that of the last stage first.
        after: if stages have copies, times of all-reduce and optimizer step, see `CopiedStages`.
    """

    replicas: int = 1
    stages: int
    microbatches: int
    capacities: Sequence[float] | None = None
    bandwidth_bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    links: LinkCosts | None = None
    memory_limits: tuple[int, ...] | None = None
    after: AfterBackward = ()


def plan_stages(
    table: PartitionTable,
    settings: PlanSettings,
    replica: Replica,
    *,
    cut_points: Sequence[str] | None = None,
) -> Plan:
    """Choose where to cut a chain of network partitions, and predict the time of a step.

    The prediction is for the network alone, without the user's code. It includes the all-reduce and
    the optimizer step if the table has their times.

    Args:
        table: Times and sizes of the partitions.
        settings: Options of the user; the schedule must not be `auto`.
        replica: The devices.
        cut_points: Names of the first partitions of all stages but the first. They are taken even
            if the stages do not fit into memory. None: the cuts are searched for.

    Raises:
        PlanError: there are more stages than partitions, a cut point is unknown or misplaced, or no
            placement fits.
    """
    stages = replica.stages
    owners = devices_of_copies(settings.copies) if settings.has_copies else ()
    if stages > (most := len(table.names)):
        raise PlanError(
            f"stages({stages}) are more than the {most} partitions of the network: ask for at "
            f"most {most} stages, or cut the network into more partitions"
        )
    speeds = [*(replica.capacities or [1.0] * (sum(settings.copies) or stages))]
    rates = replica.bandwidth_bytes_per_s, replica.latency_s
    problem = StepProblem(
        table=table,
        # the copies of a stage wait for the slowest one, whose speed is used for the cuts
        speeds=of_slowest(speeds, owners) if owners else speeds,
        links=replica.links or LinkCosts.equal(stages, *rates),
        # a stream has no fill and drain, which are negligible with many micro-batches
        microbatches=_STREAM if settings.schedule in STREAMED else replica.microbatches,
        memory_limits=replica.memory_limits or (),
    )
    if owners:
        copied = CopiedStages(
            chain=problem,
            copies=settings.copies,
            speeds=speeds,
            links=LinkCosts.equal(len(speeds), *rates),
            after=replica.after,
        )
        ends, chosen_by = _cuts_of_copies(copied, settings, cut_points)
        costs = replace(copied.stage_costs(ends), devices=[*map(min, owners)])
        predicted_s = dealt_s(copied.costs(ends), replica.microbatches)
    else:
        ends, costs, chosen_by = _cuts(problem, settings, cut_points)
        predicted_s = _predicted_s(costs, settings.schedule, replica.microbatches)
    return Plan(
        replicas=replica.replicas,
        stages=len(ends),
        microbatches=replica.microbatches,
        schedule=settings.schedule,
        cuts=tuple(table.names[end] for end in ends[:-1]),
        devices=owners or tuple(costs.devices),
        capacities=tuple(speeds),
        rows=table.rows(ends, costs),
        predicted_step_s=predicted_s,
        # stages with copies are always cut by their simulated step
        objective="step" if owners else settings.objective,
        allocation=chosen_by,
        seed=settings.seed,
        split=tuple(stage for stage, weight_s in enumerate(costs.weight_s) if weight_s),
    )


def _cuts(
    problem: StepProblem, settings: PlanSettings, cut_points: Sequence[str] | None
) -> tuple[list[int], StepCosts, str]:
    """Choose the cuts of stages without copies, or take those of the user.

    Args:
        problem: the partitions and devices.
        settings: options of the user; the schedule must not be `auto`.
        cut_points: names of the first partitions of all stages but the first; None: search for
            cuts.

    Returns:
        For each stage the number after its last partition; the costs of the stages, with their
        devices; and the name of the search, as in `Plan.allocation`.
    """
    schedule = settings.schedule
    if cut_points is not None:
        names = problem.table.names
        ends, devices = _given_for(schedule, names, cut_points, problem.m)
        chosen_by = "given"
    else:
        ends, devices, chosen_by = _best(problem, settings)
        # improve the cuts, which were found without split backwards
        if schedule == "zero_bubble":
            return *best_split_chain(problem, ends, devices), chosen_by
    if schedule == "zero_bubble":
        return ends, split_costs(problem, ends, devices), chosen_by
    # (counted operations tell nothing of the gain)
    if schedule == INSIDE and len(ends) == problem.m and problem.table.is_measured:
        return ends, split_costs_inside(problem, ends, devices), chosen_by
    return ends, problem.costs(ends, devices), chosen_by


def _cuts_of_copies(
    problem: CopiedStages, settings: PlanSettings, cut_points: Sequence[str] | None
) -> tuple[list[int], str]:
    """Choose the cuts of stages with copies, or take those of the user.

    Args:
        problem: the partitions, devices and copies.
        settings: options of the user.
        cut_points: names of the first partitions of all stages but the first; None: search for
            cuts.

    Returns:
        For each stage the number after its last partition; and the name of the search, as in
        `Plan.allocation`.

    Raises:
        PlanError: the schedule is not fill-drain, a cut point is wrong, or no cuts fit into memory.
    """
    # the search cannot predict split backwards of stages with copies
    if settings.schedule != "gpipe":
        raise PlanError(
            f"stages with copies{problem.copies} are planned with schedule 'gpipe', not "
            f"{settings.schedule!r}"
        )
    if cut_points is not None:
        return _ends_at(problem.chain.table.names, cut_points, problem.chain.m), "given"
    ends, all_tried = best_cuts(problem)
    return ends, "exact" if all_tried else "descent"


def _predicted_s(costs: StepCosts, schedule: str, microbatches: int) -> float:
    """Predict the seconds of a step, of stages without copies.

    Under a streamed schedule it is the time from one batch to the next.

    Args:
        costs: times and devices of the stages.
        schedule: name of the schedule, not `auto`.
        microbatches: number of micro-batches of a replica's batch.
    """
    if schedule == INSIDE:
        return inside_s(costs, microbatches)
    if schedule not in STREAMED:
        return fill_drain_s(costs, microbatches)
    return batch_s(STREAMED[schedule], costs, microbatches)


def _given_for(
    schedule: str, names: Sequence[str], cut_points: Sequence[str], stages: int
) -> tuple[list[int], list[int]]:
    """Place the stages that the user's cut points give: as a chain, or as a loop under `looped`.

    Args:
        schedule: name of the schedule.
        names: names of all partitions, in the order of the network.
        cut_points: names of the first partitions of all stages but the first.
        stages: number of devices of a replica.

    Returns:
        For each stage the number after its last partition; and for each stage its device, by index
        in the replica.

    Raises:
        PlanError: there are too few or too many cut points, or one is unknown or misplaced.
    """
    if schedule != "looped":
        return _ends_at(names, cut_points, stages), _order(stages)
    # every device must get the same number of stages
    rounds, rest = divmod(len(cut_points) + 1, stages)
    if rest or rounds < 2:
        raise PlanError(
            f"schedule 'looped' gives each of {stages} devices as many stages, two or more: "
            f"{2 * stages - 1} or {3 * stages - 1} ... cut points, not {len(cut_points)}"
        )
    return _ends_at(names, cut_points, rounds * stages), list(loop_order(stages, rounds))


def _ends_at(names: Sequence[str], cut_points: Sequence[str], stages: int) -> list[int]:
    """Find the ends of the stages that begin at the given partitions.

    Args:
        names: names of all partitions, in the order of the network.
        cut_points: names of the first partitions of all stages but the first.
        stages: number of stages.

    Returns:
        For each stage the number after its last partition.

    Raises:
        PlanError: a partition is unknown, or the cut points are not ``stages - 1`` in the order of
            the network.
    """
    for name in cut_points:
        if name not in names:
            close = get_close_matches(name, names[1:], n=4, cutoff=0.4) or names[1:5]
            raise PlanError(
                f"no partition begins with {name!r}; close to it: "
                f"{', '.join(map(repr, close)) or 'none, the network is one partition'}"
            )
    ends = [names.index(name) for name in cut_points]
    if len(ends) != stages - 1 or any(b <= a for a, b in pairwise([0, *ends])):
        raise PlanError(
            f"stages({stages}) need {stages - 1} cut points in the order of the network, none of "
            f"them its first partition; given: {', '.join(cut_points) or 'none'}"
        )
    return [*ends, len(names)]


def _best(problem: StepProblem, settings: PlanSettings) -> tuple[list[int], list[int], str]:
    """Search for cuts by the schedule and the options of the user, for stages without copies.

    Returns:
        For each stage the number after its last partition; for each stage its device, by index in
        the replica; and the name of the search, as in `Plan.allocation`.

    Raises:
        PlanError: no placement fits into memory, or the options contradict each other.
    """
    if settings.schedule == "looped":
        # whatever the method is, since none of them can predict the step of this schedule
        return *best_loop(problem), "descent"
    if settings.schedule == INSIDE and not settings.contiguous:
        return _chain_or_loop(problem, settings)
    if settings.allocation == "merging":
        return _within(
            problem, settings, (_merged(problem, settings), _order(problem.m), "merging")
        )
    if settings.allocation == "exact" and not settings.contiguous and problem.m > 1:
        raise PlanError(
            "method='exact' places no partitions freely: use method='gabra', or contiguous=True"
        )
    if settings.objective == "step":
        return _shortest_step(problem, settings)
    return _within(problem, settings, _allocated(problem, settings.objective, settings))


def _chain_or_loop(
    problem: StepProblem, settings: PlanSettings
) -> tuple[list[int], list[int], str]:
    """Search for the best chain and the best loop; take the one with the shorter step.

    It is for schedule `1f1b` with free placement (`contiguous=False`). A chain has one stage per
    device; in a loop (`best_loop`) each device has v stages, every m-th one for m devices. A step
    of `1f1b` takes as long in a loop as under `gpipe`. Other free placements are not tried, since
    it takes longer in them. If one of the two is not possible, the other is taken; if they are
    equally fast, the chain.

    Returns:
        For each stage the number after its last partition; for each stage its device, by index in
        the replica; and the name of the search, as in `Plan.allocation`.

    Raises:
        PlanError: neither a chain nor a loop is possible.
    """
    loop: tuple[list[int], list[int], str] | None = None
    with suppress(PlanError):  # for instance too few partitions
        loop = *best_loop(problem), "descent"
    try:
        chain = _best(problem, replace(settings, contiguous=True))
    except PlanError:
        if loop is None:
            raise
        return loop
    if loop is None or problem.step_time_s(*loop[:2]) >= problem.step_time_s(*chain[:2]):
        return chain
    return loop


def _within(
    problem: StepProblem, settings: PlanSettings, found: tuple[list[int], list[int], str]
) -> tuple[list[int], list[int], str]:
    """Check that cuts fit into memory, for searches that count it in part or not at all.

    `merging` counts no memory, and `allocate` none of copies of shared weights.

    Args:
        problem: the partitions and devices.
        settings: options of the user.
        found: for each stage the number after its last partition; for each stage its device, by
            index in the replica; and the name of the search.

    Returns:
        `found`.

    Raises:
        PlanError: a device lacks memory.
    """
    if not problem.fits(*found[:2]):
        raise PlanError(
            f"with the cuts of method={settings.allocation!r}, which counts memory in part or "
            f"not at all, {problem.m} stages do not fit ({[*problem.memory_limits]} bytes): use "
            "method='gabra' and objective='step', which keep the limits"
        )
    return found


def _shortest_step(
    problem: StepProblem, settings: PlanSettings
) -> tuple[list[int], list[int], str]:
    """Search for the stages with the shortest predicted step, for ``objective="step"``.

    The best chain is found by `best_chain`. If placements are free, GABRA searches them too, and
    its result is taken if it is faster than the chain.

    Returns:
        For each stage the number after its last partition; for each stage its device, by index in
        the replica; and the name of the search, as in `Plan.allocation`.

    Raises:
        PlanError: no placement fits into memory.
    """
    order = _order(problem.m)
    ends, chain_s = list[int](), float("inf")
    try:
        # if no chain fits, a free placement may, since a device can take several small runs
        ends, chain_s = best_chain(problem, order)
    except PlanError as error:
        if settings.contiguous:
            raise PlanError(f"stages({problem.m}) cannot be placed: {error}") from error
    # only free placements need another search than that for chains
    if settings.contiguous or problem.m == 1:
        return ends, order, "dynamic"
    # small problems need fewer evaluations than the limit
    calls = min(_MOST_CALLS, 50 * problem.n * problem.m)
    try:
        genes, history = evolve(FreePlacements(problem), settings.seed, Breeding(evaluations=calls))
    except AllocationError as error:
        if not ends:
            raise PlanError(f"stages({problem.m}) cannot be placed: {error}") from error
        return ends, order, "dynamic"
    # a chain that is as fast is preferred: it sends less and is easier to read
    if chain_s <= history[-1]:
        return ends, order, "dynamic"
    return *runs(genes), "gabra"


def _merged(problem: StepProblem, settings: PlanSettings) -> list[int]:
    """Cut a chain by the rule of `allocation.merging`.

    Returns:
        For each stage the number after its last partition.

    Raises:
        PlanError: the option `contiguous` is False.
    """
    if not settings.contiguous:
        raise PlanError(
            "method='merging' leaves one run of partitions for each device: use "
            "contiguous=True, or method='gabra'"
        )
    return merge(problem.table.loads, _cut_costs(problem), problem.m)


def _allocated(
    problem: StepProblem, objective: Literal["makespan", "profit"], settings: PlanSettings
) -> tuple[list[int], list[int], str]:
    """Search for the stages of least makespan or most profit, by `allocation.allocate`.

    Cuts of a chain are exact; free placements are searched by GABRA.

    Returns:
        For each stage the number after its last partition; for each stage its device, by index in
        the replica; and the name of the search, as in `Plan.allocation`.

    Raises:
        PlanError: no placement fits into memory.
    """
    loads, order = problem.table.loads, _order(problem.m)
    capacities = [problem.speeds[device] for device in order]
    if objective == "profit":
        # Eq. 5 fills capacities: there must be room to spare for placements to differ
        room = max(1.25 * sum(loads) / sum(capacities), max(loads) / min(capacities))
        capacities = [speed * room for speed in capacities]
    limited = bool(problem.ceilings)
    try:
        found = allocate(
            Problem(
                np.array(loads),
                np.array(capacities),
                cut_costs=np.array(_cut_costs(problem)),
                memory=np.array(problem.table.memory_bytes if limited else ()),
                memory_limits=np.array([problem.memory_limits[d] for d in order if limited]),
                objective=objective,
                contiguous=settings.contiguous,
                # the driver owns the last stage, beside which the loss is computed
                last_device=problem.m - 1,
            ),
            seed=settings.seed,
        )
    except AllocationError as error:
        raise PlanError(f"stages({problem.m}) cannot be placed: {error}") from error
    ends, places = runs(found.assignment)
    return ends, [order[place] for place in places], "exact" if settings.contiguous else "gabra"


def _cut_costs(problem: StepProblem) -> list[float]:
    """For each partition but the last, the seconds of a micro-batch's messages if a cut follows it.

    Activations and gradients are of one size; all links are taken to be equal.
    """
    seconds_per_byte = problem.links.seconds_per_byte[0][0]  # all links are taken to be equal
    return [2 * size * seconds_per_byte for size in problem.table.cut_bytes]


def _order(stages: int) -> list[int]:
    """For each stage of a chain its device, by index in the replica: 1, 2, ... and 0, the driver's.

    Args:
        stages: number of stages.
    """
    return [*range(1, stages), 0]
