"""From a table of the partitions to a plan: choose the cuts, predict the step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Literal

from lightning_hybrid.allocation import Breeding, allocate, evolve, merge
from lightning_hybrid.errors import AllocationError, PlanError
from lightning_hybrid.planning.chains import best_chain
from lightning_hybrid.planning.copied_stages import (
    AfterBackward,
    CopiedStages,
    best_cuts,
    of_slowest,
    owners_of,
)
from lightning_hybrid.planning.dealt_time import dealt_s
from lightning_hybrid.planning.free_placements import FreePlacements, runs
from lightning_hybrid.planning.looped_placements import best_loop
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.split_backwards import best_split_chain, split_costs
from lightning_hybrid.planning.step_problem import Links, StepProblem
from lightning_hybrid.planning.step_time import StepCosts, fill_drain_s
from lightning_hybrid.planning.streamed_time import batch_s
from lightning_hybrid.schedules import SCHEDULES, STREAMED, DelayedWeights, loop_order

Objective = Literal["step", "makespan", "profit"]
Method = Literal["gabra", "exact", "merging"]
AUTO = "auto"

_MOST_CALLS = 5_000
"""Simulated steps that the search for a free placement may take."""

_STREAM = 64
"""Micro-batches that stand for a stream of batches, which is bound by its slowest stage like
fill-drain of many."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What the user has asked for.

    Attributes:
        schedule: name of the schedule, or ``"auto"``.
        allocation: how the cuts are chosen, ``"gabra"``, ``"exact"`` or ``"merging"``; or cut
            points as named in the LightningModule. `merging` has a rule of its own and no
            objective, and takes the devices to be equal; see `allocation.merging`.
        objective: what the choice optimises. `step` is the predicted step. Contiguous stages are
            then cut by a dynamic programme, whatever the method, and the plan says so; free ones
            are bred by `gabra`, and the best chain is taken where it is no worse. `profit` needs
            limits, which profiled devices don't have; the capacities are then scaled to hold the
            network with a quarter to spare.
        seed: of the genetic algorithm.
        contiguous: whether each device gets one run of partitions. Else it may get several, and
            each run is a stage: then the plan has as many stages as the allocation has runs.
        recompute: whether stages keep no activations, and run their forward again; ``"auto"``: if
            nothing else fits.
        compiled: whether stages are compiled, whose backward is one.
        delayed_weights: what the backward of a batch computes with under a delayed schedule.
        shards_states: whether replicas divide the state of the optimizer.
        copies: of each stage; empty: each has one.
    """

    schedule: str = "gpipe"
    allocation: Method | tuple[str, ...] = "gabra"
    objective: Objective = "step"
    seed: int = 0
    contiguous: bool = True
    recompute: bool | Literal["auto"] = "auto"
    compiled: bool = False
    delayed_weights: DelayedWeights = "stash"
    shards_states: bool = False
    copies: tuple[int, ...] = ()

    @property
    def has_copies(self) -> bool:
        """Whether any stage has several."""
        return max(self.copies, default=1) > 1


@dataclass(frozen=True, kw_only=True)
class Replica:
    """The devices of a replica, and what they do with a batch.

    Attributes:
        replicas: number of replicas, which are all alike.
        stages: number of devices of each, and of its stages if those are contiguous. With copies
            that of the stages.
        microbatches: number of micro-batches.
        capacities: relative speeds of the devices; None: all equal. Device 0 is the driver's and
            gets the last stage.
        bandwidth_bytes_per_s: speed of the links between the devices.
        latency_s: their latency.
        memory_limits: what each device may hold, a hard limit; None: no limit. With copies of each
            stage, the driver's first.
        after: of stages with copies, what follows the last backward.
    """

    replicas: int = 1
    stages: int
    microbatches: int
    capacities: Sequence[float] | None = None
    bandwidth_bytes_per_s: float = float("inf")
    latency_s: float = 0.0
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

    The prediction holds for the network alone, without the user's code; the all-reduce and the
    optimizer step are in it as far as they are given.

    Args:
        table: What is known of the partitions.
        settings: What the user has asked for, with the schedule chosen.
        replica: The devices.
        cut_points: Names of the first partition of each next stage, instead of a search; each
            device has one. They are taken and predicted even where they do not fit.

    Raises:
        PlanError: more stages than partitions, an unknown or misplaced cut point or schedule, or no
            placement.
    """
    schedule, stages, given = settings.schedule, replica.stages, replica.capacities
    speeds = [1.0] * stages if given is None else list(given)
    if settings.has_copies and given is not None:
        # the other copies of a stage wait for its slowest one: that is all the cuts need to know
        speeds = of_slowest(given, owners_of(settings.copies))
    _check_shape(stages, len(table.names), speeds, settings)
    problem = StepProblem(
        table=table,
        speeds=speeds,
        links=Links.equal(stages, replica.bandwidth_bytes_per_s, replica.latency_s),
        # a stream has no end: many micro-batches make the fill and the drain negligible
        microbatches=_STREAM if schedule in STREAMED else replica.microbatches,
        memory_limits=replica.memory_limits or (),
    )
    capacities = tuple(speeds)
    devices: tuple[int | tuple[int, ...], ...]
    if settings.has_copies:
        copied = CopiedStages(
            chain=problem, copies=settings.copies, speeds=given or (), after=replica.after
        )
        ends, chosen_by = _cuts_of_copies(copied, settings, cut_points)
        devices, capacities = owners_of(settings.copies), tuple(copied.speeds)
        costs = replace(copied.stage_costs(ends), devices=[*map(min, devices)])
        predicted_s = dealt_s(copied.costs(ends), replica.microbatches)
    else:
        ends, costs, chosen_by = _cuts(problem, settings, cut_points)
        devices = tuple(costs.devices)
        predicted_s = _predicted_s(costs, schedule, replica.microbatches)
    return Plan(
        replicas=replica.replicas,
        stages=len(ends),
        microbatches=replica.microbatches,
        schedule=schedule,
        cuts=tuple(table.names[end] for end in ends[:-1]),
        devices=devices,
        capacities=capacities,
        rows=table.rows(ends, costs),
        predicted_step_s=predicted_s,
        # cuts of copied stages are chosen by their simulated step alone
        objective="step" if settings.has_copies else settings.objective,
        allocation=chosen_by,
        seed=settings.seed,
        split=tuple(stage for stage, weight_s in enumerate(costs.weight_s) if weight_s),
    )


def _cuts(
    problem: StepProblem, settings: PlanSettings, cut_points: Sequence[str] | None
) -> tuple[list[int], StepCosts, str]:
    """The ends of the stages, what those take, and which search found them."""
    splits, names = settings.schedule == "zero_bubble", problem.table.names
    if cut_points is not None:
        ends, devices = _given_for(settings.schedule, names, cut_points, problem.m)
        costs = (split_costs if splits else StepProblem.costs)(problem, ends, devices)
        return ends, costs, "given"
    ends, devices, chosen_by = _best(problem, settings)
    # cuts that were good without a split may not be with one: halves of a backward end sooner
    if splits:
        return *best_split_chain(problem, ends, devices), chosen_by
    return ends, problem.costs(ends, devices), chosen_by


def _cuts_of_copies(
    problem: CopiedStages, settings: PlanSettings, cut_points: Sequence[str] | None
) -> tuple[list[int], str]:
    """The ends of stages with copies, and which search found them.

    Raises:
        PlanError: the schedule is not fill-drain, a cut point is wrong, or no cuts fit.
    """
    # no search for cuts knows the step of a dealt schedule with split backwards
    if settings.schedule != "gpipe":
        raise PlanError(
            f"stages with copies{problem.copies} are planned with schedule 'gpipe', not "
            f"{settings.schedule!r}"
        )
    if cut_points is not None:
        return _given(problem.chain.table.names, cut_points, problem.chain.m), "given"
    ends, all_tried = best_cuts(problem)
    return ends, "exact" if all_tried else "descent"


def _check_shape(
    stages: int, partitions: int, speeds: Sequence[float], settings: PlanSettings
) -> None:
    if stages > partitions:
        raise PlanError(
            f"stages({stages}) are more than the {partitions} partitions of the network: "
            f"ask for at most {partitions} stages, or cut the network into more partitions"
        )
    if settings.schedule not in SCHEDULES:
        raise PlanError(f"schedule {settings.schedule!r} is none of {', '.join(SCHEDULES)}")
    if settings.schedule == "zero_bubble" and not settings.contiguous:
        raise PlanError(
            "schedule 'zero_bubble' gives each stage a device of its own: use contiguous=True, or "
            "schedule 'gpipe'"
        )
    if len(speeds) != stages:
        raise PlanError(f"stages({stages}) != {len(speeds)} capacities {speeds}")


def _predicted_s(costs: StepCosts, schedule: str, microbatches: int) -> float:
    """Seconds of a step, or of a batch in the stream."""
    if schedule not in STREAMED:
        return fill_drain_s(costs, microbatches)
    return batch_s(STREAMED[schedule], costs, microbatches)


def _given_for(
    schedule: str, names: Sequence[str], cut_points: Sequence[str], stages: int
) -> tuple[list[int], list[int]]:
    """The ends and devices of stages that begin where the user has said."""
    if schedule != "looped":
        return _given(names, cut_points, stages), _order(stages)
    # each round visits every device once: with a rest some would miss a turn
    rounds, rest = divmod(len(cut_points) + 1, stages)
    if rest or rounds < 2:
        raise PlanError(
            f"schedule 'looped' gives each of {stages} devices as many stages, two or more: "
            f"{2 * stages - 1} or {3 * stages - 1} ... cut points, not {len(cut_points)}"
        )
    return _given(names, cut_points, rounds * stages), list(loop_order(stages, rounds))


def _given(names: Sequence[str], cut_points: Sequence[str], stages: int) -> list[int]:
    """The ends of the stages whose next ones begin with the partitions named."""
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
    """The ends of the stages, their devices, and which search found them."""
    if settings.schedule == "looped":
        # whatever the method: none of them knows the step of stages that share devices
        return *best_loop(problem), "descent"
    if settings.allocation == "merging":
        return _merged(problem, settings), _order(problem.m), "merging"
    method: Literal["gabra", "exact"] = "exact" if settings.allocation == "exact" else "gabra"
    if settings.objective == "step":
        return _shortest_step(problem, method, settings)
    return *_allocated(problem, method, settings.objective, settings), method


def _shortest_step(
    problem: StepProblem, method: Literal["gabra", "exact"], settings: PlanSettings
) -> tuple[list[int], list[int], str]:
    """The ends of the stages, their devices, and which search found them."""
    order = _order(problem.m)
    ends, chain_s = list[int](), float("inf")
    try:
        # where no chain fits a free placement may: a device can take several small runs
        ends, chain_s = best_chain(problem, order)
    except PlanError as error:
        if settings.contiguous:
            raise PlanError(f"stages({problem.m}) cannot be placed: {error}") from error
    # a chain is solved exactly, so nothing is left to breed
    if settings.contiguous or problem.m == 1:
        return ends, order, "dynamic"
    if method == "exact":
        raise PlanError(
            "no exact solver knows the step of a free placement: use allocation='gabra', or "
            "objective='makespan'"
        )
    # small problems are searched to the end long before the limit
    calls = min(_MOST_CALLS, 50 * problem.n * problem.m)
    try:
        genes, history = evolve(FreePlacements(problem), settings.seed, Breeding(evaluations=calls))
    except AllocationError as error:
        if not ends:
            raise PlanError(f"stages({problem.m}) cannot be placed: {error}") from error
        return ends, order, "dynamic"
    # of two equal placements the chain sends less and is easier to read
    if chain_s <= history[-1]:
        return ends, order, "dynamic"
    return *runs(genes), "gabra"


def _merged(problem: StepProblem, settings: PlanSettings) -> list[int]:
    """The ends of the stages that are left when the most expensive cuts are closed."""
    if not settings.contiguous:
        raise PlanError(
            "allocation='merging' leaves one run of partitions for each device: use "
            "contiguous=True, or allocation='gabra'"
        )
    # it closes the dearest cuts and looks at nothing else, memory included
    ends = merge(problem.table.loads, _cut_costs(problem), problem.m)
    if not problem.fits(ends, _order(problem.m)):
        raise PlanError(
            f"allocation='merging' knows no limits of memory, and with its cuts {problem.m} stages "
            f"do not fit ({[*problem.memory_limits]} bytes): use allocation='gabra', which keeps "
            "them"
        )
    return ends


def _allocated(
    problem: StepProblem,
    method: Literal["gabra", "exact"],
    objective: Literal["makespan", "profit"],
    settings: PlanSettings,
) -> tuple[list[int], list[int]]:
    """The ends of the stages, and their devices; neighbouring runs of a device are one stage."""
    loads, speeds = problem.table.loads, problem.speeds
    capacities = list(speeds)
    if objective == "profit":
        # Eq. 5 fills capacities: without some room to spare every placement would be the same
        room = max(1.25 * sum(loads) / sum(speeds), max(loads) / min(speeds))
        capacities = [speed * room for speed in speeds]
    limited = bool(problem.ceilings)
    try:
        found = allocate(
            loads,
            capacities,
            cut_costs=_cut_costs(problem),
            memory=problem.table.memory_bytes if limited else None,
            memory_limits=problem.memory_limits if limited else None,
            method=method,
            objective=objective,
            contiguous=settings.contiguous,
            # the driver, device 0, owns the last stage, beside which the loss is computed
            last_device=0,
            device_order=_order(len(speeds)) if settings.contiguous else None,
            seed=settings.seed,
        )
    except AllocationError as error:
        raise PlanError(f"stages({len(speeds)}) cannot be placed: {error}") from error
    return runs(found.assignment)


def _cut_costs(problem: StepProblem) -> list[float]:
    """Seconds of a cut after each partition: activations cross it, and gradients of their size."""
    seconds_per_byte = problem.links.seconds_per_byte[0][0]  # the links of a plan are equal
    return [2 * size * seconds_per_byte for size in problem.table.cut_bytes]


def _order(stages: int) -> list[int]:
    """The device of each stage of a chain: the driver, 0, has the last."""
    return [*range(1, stages), 0]
