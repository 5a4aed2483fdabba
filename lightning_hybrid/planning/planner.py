"""From a captured network to a plan: profile its partitions, choose the cuts.

What the user leaves open is chosen here: the schedule, and whether forwards run twice.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch.optim import Optimizer

from lightning_hybrid.errors import PlanError
from lightning_hybrid.graph import Profile, count, find_boundary
from lightning_hybrid.planning.cluster import Cluster, Rates
from lightning_hybrid.planning.copied_stages import of_slowest, owners_of
from lightning_hybrid.planning.measure import Advance
from lightning_hybrid.planning.memory_check import Fit, Way, check_memory
from lightning_hybrid.planning.memory_needed import (
    Held,
    Life,
    held_in_training,
    optimizer_bytes,
    remaining,
    with_peaks,
)
from lightning_hybrid.planning.partition_table import CalledNetwork, PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.search import AUTO, PlanSettings, Replica, plan_stages
from lightning_hybrid.schedules import STREAMED

BANDWIDTH_BYTES_PER_S = {"gloo": 1e9, "nccl": 2e10}
"""What a link between two ranks is taken to carry where it was not measured. It weighs the bytes
that cross a cut against the seconds of computation; gloo is 10 Gbit/s, NCCL a PCIe bus."""

MARGIN = 0.05
"""Share of a step that another schedule must save to be taken in place of fill-drain. Predictions
are not better than that: they do not know the time between two instructions, and the others have
more of these."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a network is to be placed.

    Attributes:
        replicas: number of replicas.
        stages: number of devices of a replica; of stages, where they have copies.
        backend: ``"gloo"`` or ``"nccl"``.
        device: where to measure.
        cluster: the devices; None: they are taken to be equal, and large enough.
        beside: plans of the networks that are on these devices already, and keep their memory.
        present_bytes: of the network, which each device had when it was asked what it may take, and
            gives back where another one owns it.
    """

    replicas: int
    stages: int
    backend: str
    device: torch.device
    cluster: Cluster | None = None
    beside: Sequence[Plan] = ()
    present_bytes: int = 0

    @property
    def limits(self) -> tuple[int, ...] | None:
        """Bytes that each device of a replica may take of the network; None: not known."""
        limits = None if self.cluster is None else self.cluster.memory_limits
        # what is in use by this network itself was counted as taken when devices were asked
        left = remaining(limits, self.beside)
        return left and tuple(limit + self.present_bytes for limit in left)

    @property
    def rates(self) -> Rates | None:
        """What a step takes beside computing; None: not known."""
        return None if self.cluster is None else self.cluster.rates


def make_plan(
    network: CalledNetwork,
    microbatches: int,
    *,
    settings: PlanSettings,
    site: Site,
    optimizers: Sequence[Optimizer] | None = None,
    advance: Advance | None = None,
) -> Plan:
    """Measure the partitions on a real micro-batch and let the allocation choose the cuts.

    With given cut points nothing is measured: unless the profile is known, loads are counted, and
    the time is not predicted.

    Args:
        network: with the tensors of a micro-batch.
        microbatches: their number.
        settings: what the user has asked for.
        site: the devices.
        optimizers: that will train it; None: it is not trained in this run, so that it needs room
            for its parameters alone.
        advance: hears which partition is measured, from 1, and how many there are.

    Raises:
        NetworkError: a cut point is unknown, or the network may not be cut there.
        PlanError: the network cannot be placed on that many devices.
    """
    graph, trains, first = network.graph, optimizers is not None, None
    if isinstance(settings.allocation, tuple):
        # where cuts are given nothing is compared: to measure would cost seconds for no decision
        first = _first_of_stages(network, settings.allocation)
        profile = network.known or count(graph, network.partitions)
    else:
        profile = network.profile(site.device, advance)
    if optimizers is not None and profile.is_measured:
        sharers = site.replicas if settings.shards_states else 1
        state_bytes = optimizer_bytes(graph.network, optimizers, sharers)
        profile = profile.with_optimizer(network.partitions, state_bytes)
        # gradients are averaged in buckets, copies that one replica does not need
        averages = site.replicas > 1 or settings.has_copies
        profile = profile.averaged() if averages else profile
    # the driver has the batch, and what the network makes of it
    passed = sum(leaf.nbytes for leaf in network.leaves) + 2 * profile.partitions[-1].output_bytes
    batch_bytes = microbatches * passed if trains else 0
    rates = site.rates if trains else None
    table = _table(network, profile, trains=trains)
    replica = _replica(site, settings, microbatches, batch_bytes, profile)
    if rates is not None:
        reduce_s, step_s = rates.after_backward(table.gradient_bytes, site.replicas)
        table = replace(table, reduce_s=reduce_s, step_s=step_s)
        # copies average with each other too, so each stage has a ring of its own length
        rings = [site.replicas * copies for copies in settings.copies]
        after = [rates.after_backward(table.gradient_bytes, owners) for owners in rings]
        replica = replace(replica, after=after)
    plan = plan_within(
        table,
        settings,
        replica,
        partial(_check, profile, settings, microbatches * (graph.batch_of(network.leaves) or 1)),
        trains=trains,
        measured=profile.is_measured,
        cut_points=first,
    )
    if not profile.is_measured:  # counted loads say nothing of times
        return plan.without_times()
    # without training nothing grows after the start, so there are no peaks to tell
    if not trains:
        return plan
    sizes = {name: p.nbytes for name, p in graph.network.named_parameters()}
    largest = max(row.parameter_bytes for row in profile.partitions)
    life = Life(
        start_bytes=max(site.present_bytes, largest),
        passing_bytes={
            row.name: max(row.working_bytes, *(sizes[name] for name in partition.parameters), 0)
            for row, partition in zip(profile.partitions, network.partitions)
        },
        batch_bytes=batch_bytes,
        on_cpu=site.device.type == "cpu",
    )
    return with_peaks(plan, life, site.limits)


def _replica(
    site: Site, settings: PlanSettings, microbatches: int, batch_bytes: int, profile: Profile
) -> Replica:
    """The devices of a site, with what they have left for their stages."""
    limits, cluster, rates = site.limits, site.cluster, site.rates
    if settings.has_copies:
        limits = limits and tuple(map(int, of_slowest(limits, owners_of(settings.copies))))
    # any stage may hold the partition whose operations take the most
    working = max(row.working_bytes for row in profile.partitions)
    return Replica(
        replicas=site.replicas,
        stages=site.stages,
        microbatches=microbatches,
        capacities=None if cluster is None else cluster.capacities,
        bandwidth_bytes_per_s=(cluster and cluster.bandwidth_bytes_per_s)
        or BANDWIDTH_BYTES_PER_S[site.backend],
        latency_s=0.0 if rates is None else rates.message_s,
        memory_limits=limits
        and tuple(
            max(0, limit - working - batch_bytes * (device == 0))
            for device, limit in enumerate(limits)
        ),
    )


def _table(network: CalledNetwork, profile: Profile, *, trains: bool) -> PartitionTable:
    """What the search knows of each partition."""
    table = PartitionTable.of(network.graph, network.partitions, profile)
    if not trains:  # nothing is kept but the parameters
        sizes = [row.parameter_bytes for row in profile.partitions]
        return replace(table, kept_bytes=sizes, activation_bytes=[0] * len(sizes))
    if not profile.is_measured:  # counted activations are no measure of memory
        return replace(table, kept_bytes=(), activation_bytes=())
    return table


def _check(
    profile: Profile,
    settings: PlanSettings,
    batch: int,
    table: PartitionTable,
    limits: tuple[int, ...],
    held: Held,
    way: Way,
    *,
    trains: bool,
) -> None:
    """Complain if no placement can hold the network, with what would fit.

    Raises:
        PlanError: see :func:`check_memory`.
    """
    tried: list[Fit] = []
    # of streams another number of micro-batches is no alternative
    if settings.schedule not in STREAMED:
        ways = [way, replace(way, recompute=False)] if way.recompute else [way]
        tried = [Fit.of(table, way, limits, batch, may_recompute=trains) for way in ways]
    # cuts that were given are taken as they are, whether they fit or not
    searched = isinstance(settings.allocation, str)
    check_memory(
        profile,
        held.needed,
        held.room(limits) or (),
        held.most,
        recompute=way.recompute,
        tried=tried,
        contiguous=searched and settings.contiguous and settings.schedule != "looped",
    )


def _first_of_stages(network: CalledNetwork, cut_points: Sequence[str]) -> list[str]:
    """The first partition of each next stage of a network, where the user has given cut points.

    Raises:
        NetworkError: one is unknown, or the network may not be cut there.
    """
    prefix = f"{network.name}." if network.name else ""
    # with several networks each has its own; one that names none of them is an error below
    mine = [point for point in cut_points if point.startswith(prefix)]
    points = [point.removeprefix(prefix) for point in mine or cut_points]
    parts, prefix = network.partitions, prefix if mine else ""
    return [parts[find_boundary(parts, point, prefix)].name for point in points]


def plan_within(
    table: PartitionTable,
    settings: PlanSettings,
    replica: Replica,
    check: Callable[..., None] | None = None,
    *,
    trains: bool = True,
    measured: bool = True,
    cut_points: Sequence[str] | None = None,
) -> Plan:
    """Plan stages that fit into memory, with what the user has left open chosen.

    Args:
        table: of the partitions, with what they keep and what their activations take.
        settings: what the user has asked for.
        replica: the devices.
        check: complains in its own words where nothing fits; it gets the table, the limits, what
            is held, the way that is tried, and whether the network is trained.
        trains: whether there is a backward.
        measured: whether times are known.
        cut_points: see :func:`plan_stages`.

    Raises:
        PlanError: there is no placement.
    """
    limits, stages, microbatches = replica.memory_limits, replica.stages, replica.microbatches

    def plan_with(recompute: bool) -> Plan:
        held = Held([round(size) for size in table.kept_bytes])
        if trains:
            held = held_in_training(table, settings, stages, microbatches, recompute)
        if check is not None and limits is not None and held.needed:
            way = Way(stages=stages, microbatches=microbatches, recompute=recompute)
            check(table, limits, held, way, trains=trains)
        planned = replace(table, memory_bytes=held.needed)
        if recompute:
            planned = planned.recomputed()
        elif settings.compiled:  # the backward of a compiled stage cannot be split
            planned = planned.joint()
        beside_inputs = replace(replica, memory_limits=held.room(limits))
        plan = plan_by_schedule(
            settings.schedule,
            lambda name: plan_stages(
                planned,
                replace(settings, schedule=name),
                beside_inputs,
                cut_points=cut_points,
            ),
            contiguous=settings.contiguous,
            measured=measured,
        )
        return replace(plan, recompute=recompute)

    return plan_within_memory(
        settings.recompute if stages > 1 and trains else False, plan_with, limits
    )


def plan_by_schedule(
    schedule: str, plan_with: Callable[[str], Plan], *, contiguous: bool, measured: bool
) -> Plan:
    """Make a plan, with a schedule that is chosen if it is not given.

    Delayed schedules are never chosen: they train another model. Nor are streamed ones, which ask
    something of the training step that no plan can know.

    Args:
        schedule: Its name, or `auto`.
        plan_with: Makes the plan with the schedule of this name.
        contiguous: Whether each device is to have one stage. So may its backward be split; several
            stages may be in a loop.
        measured: Whether times are known. Else fill-drain is taken.
    """
    if schedule != AUTO:
        return plan_with(schedule)
    # fill-drain exists for every network and has the fewest instructions: others must beat it
    best = plan_with("gpipe")
    # one stage has no bubble to shorten, and counts are no seconds to compare
    if best.stages == 1 or not measured:
        return best
    try:
        other = plan_with("zero_bubble" if contiguous else "looped")
    except PlanError:  # too few partitions for a loop
        return best
    return other if other.step_s < (1 - MARGIN) * best.step_s else best


def plan_within_memory(
    recompute: bool | Literal["auto"],
    plan_with: Callable[[bool], Plan],
    limits: Sequence[int] | None = None,
) -> Plan:
    """Make a plan, of stages that compute their activations again where that is faster, or needed.

    It can be faster where memory alone says where the cuts are: with more room they are where the
    stages take equally long.

    Args:
        recompute: Whether they do; `auto`: where without it no placement is found, or one that is
            slower.
        plan_with: Makes the plan, with recomputation or without.
        limits: Bytes that each device may take; None: not known.

    Raises:
        PlanError: There is no placement.
    """
    if isinstance(recompute, bool):
        return plan_with(recompute)
    try:
        # a forward that runs twice is a third more to compute, so this comes first
        plan = plan_with(False)
    except PlanError:
        return plan_with(True)
    if limits is None or not _is_tight(plan, limits):
        return plan
    with suppress(PlanError):
        other = plan_with(True)
        if other.step_s < (1 - MARGIN) * plan.step_s:
            return other
    return plan


def _is_tight(plan: Plan, limits: Sequence[int]) -> bool:
    """Whether memory may have said where the cuts are: one more stage of a device fits nowhere.

    Args:
        plan: to look at.
        limits: as `plan_stages` takes them: where stages have copies, by stage, the last one first.
    """
    held = [0] * len(limits)
    for stage, row in enumerate(plan.rows):
        place = (stage + 1) % plan.stages if max(plan.copies) > 1 else row.device
        held[place] += row.memory_bytes or 0
    return any(2 * size > limit for size, limit in zip(held, limits))
