"""Plan a captured network: profile its partitions and choose the cuts.

If the user leaves them open, the schedule and whether to recompute activations are chosen here too.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.optim import Optimizer

from lightning_hybrid.errors import PlanError
from lightning_hybrid.graph import find_boundary
from lightning_hybrid.planning.called_network import CalledNetwork
from lightning_hybrid.planning.copied_stages import devices_of_copies, of_slowest
from lightning_hybrid.planning.memory_check import (
    ChainSizes,
    MemoryFit,
    TrainingMemory,
    check_memory,
)
from lightning_hybrid.planning.memory_needed import (
    RunMemory,
    held_in_training,
    optimizer_bytes,
    remaining,
    with_peaks,
)
from lightning_hybrid.planning.partition_table import PartitionTable, count
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.run_cluster import Cluster, Rates
from lightning_hybrid.planning.search import AUTO, PlanSettings, Replica, plan_stages
from lightning_hybrid.planning.step_time import MARGIN
from lightning_hybrid.schedules import INSIDE, STREAMED

BANDWIDTH_BYTES_PER_S = {"gloo": 1e9, "nccl": 2e10}
"""By backend, the bandwidth of a link between two ranks that is assumed if none was measured: for
gloo about that of 10 Gbit/s Ethernet, for NCCL that of a PCIe bus. With it the search weighs
messages against computation."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The devices that a network is to be placed on.

    Attributes:
        replicas: number of replicas.
        stages: number of devices of a replica; if stages have copies, number of stages.
        backend: ``"gloo"`` or ``"nccl"``.
        device: device to measure on.
        cluster: the devices; None: they are taken to be equal, and to have enough memory.
        beside: plans of the networks that are placed on these devices already, and use memory.
        present_bytes: bytes of the network that each device held when its free memory was read;
            they count as free, since a rank frees what other ranks own.
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
        """By index of the device in the replica, the bytes that it may use; None: not known.

        What the networks in `beside` need is subtracted, and `present_bytes` are added.
        """
        limits = None if self.cluster is None else self.cluster.memory_limits
        # the network itself was in memory when free memory was read: add its size again
        left = remaining(limits, self.beside)
        return left and tuple(limit + self.present_bytes for limit in left)

    @property
    def rates(self) -> Rates | None:
        """Costs of messages, all-reduces and optimizer steps; None: not known."""
        return None if self.cluster is None else self.cluster.rates


def make_plan(
    network: CalledNetwork,
    microbatches: int,
    *,
    settings: PlanSettings,
    site: Site,
    optimizers: Sequence[Optimizer] | None = None,
) -> Plan:
    """Profile the partitions of a network on a real micro-batch, and make its plan.

    If the user has given cut points, nothing is measured: unless the profile is known, FLOPs are
    counted, and times are not predicted.

    Args:
        network: the network, with the input tensors of one micro-batch.
        microbatches: number of micro-batches of a replica's batch.
        settings: options of the user.
        site: the devices.
        optimizers: optimizers that train the network; None: it is not trained in this run, so that
            only its parameters need memory.

    Returns:
        The plan. If the network is trained and was profiled, its rows have peaks of memory.

    Raises:
        NetworkError: a cut point is unknown, or the network must not be cut there.
        PlanError: the network cannot be placed on these devices.
    """
    trains, cut_points = optimizers is not None, None
    if isinstance(settings.allocation, tuple):
        # cuts are given, so there is nothing to decide by measured times
        cut_points = _first_of_stages(network, settings.allocation)
        table = network.known or count(network.graph, network.partitions)
    else:
        table = network.profile(site.device)
    goes_inside = settings.may_go_inside and trains and not network.graph.no_shares
    # (where no backward can run inside of calls all micro-batches are kept, as under fill-drain)
    if settings.schedule == INSIDE and not goes_inside:
        settings = replace(settings, schedule="gpipe")
    table = _with_memory(network, table, settings, site, optimizers)
    # The driver holds the batch, the network's outputs and their gradients; but of the outputs
    # those of one micro-batch, if backwards run inside of the call.
    given = microbatches * sum(leaf.nbytes for leaf in network.leaves)
    each = 2 * round(table.output_bytes)
    on_driver = {AUTO: given + microbatches * each, INSIDE: given + each} if trains else {}

    def replica_for(schedule: str) -> Replica:
        batch_bytes = on_driver.get(schedule, on_driver.get(AUTO, 0))
        return _replica(site, settings, microbatches, batch_bytes, table)

    replica = replica_for(settings.schedule)
    inside = replica_for(INSIDE) if goes_inside and cut_points is None else None
    if trains and (rates := site.rates) is not None:
        reduce_s, step_s = rates.after_backward(table.gradient_bytes, site.replicas)
        table = replace(table, reduce_s=reduce_s, step_s=step_s)
        # copies of a stage average too, so the number of ranks differs from stage to stage
        rings = [site.replicas * copies for copies in settings.copies]
        after = [rates.after_backward(table.gradient_bytes, owners) for owners in rings]
        replica = replace(replica, after=after)
    batch = microbatches * (network.graph.batch_of(network.leaves) or 1)
    plan = plan_within(
        table, settings, replica, batch, trains=trains, cut_points=cut_points, inside=inside
    )
    if not table.is_measured:  # counted loads say nothing of times
        return plan.without_times()
    # without training memory does not grow, so that no peaks are given
    if not trains:
        return plan
    batch_bytes = on_driver.get(plan.schedule, on_driver[AUTO])
    return with_peaks(plan, _life(network, table, site, batch_bytes), site.limits)


def _with_memory(
    network: CalledNetwork,
    table: PartitionTable,
    settings: PlanSettings,
    site: Site,
    optimizers: Sequence[Optimizer] | None,
) -> PartitionTable:
    """Make a copy of a table with the memory that partitions keep in this run, whatever the cuts.

    Args:
        network: the network.
        table: its partitions.
        settings: options of the user.
        site: the devices.
        optimizers: optimizers that train the network; None: it is not trained, and keeps only its
            parameters.

    Returns:
        The table with `kept_bytes`, or without them if FLOPs were counted and nothing was measured.
    """
    if optimizers is None:  # only parameters are kept
        nothing = [0] * len(table.names)
        kept = table.parameter_bytes
        table = replace(table, kept_bytes=kept, gradient_bytes=nothing, activation_bytes=nothing)
        return replace(table, tied=[replace(w, copy_bytes=w.size_bytes) for w in table.tied])
    if not table.is_measured:  # memory is not known from counted FLOPs
        return replace(table, kept_bytes=(), activation_bytes=())
    sharers = site.replicas if settings.shards_states else 1
    states = optimizer_bytes(network.graph.network, optimizers, sharers)
    table = table.with_optimizer(network.partitions, states)
    # averaging needs buckets, which take memory of the size of the gradients
    return table.averaged() if site.replicas > 1 or settings.has_copies else table


def _life(network: CalledNetwork, table: PartitionTable, site: Site, batch_bytes: int) -> RunMemory:
    """Collect the memory that ranks take beside their stages, for `with_peaks`.

    Args:
        network: the network.
        table: its partitions.
        site: the devices.
        batch_bytes: bytes on the driver for inputs, outputs and their gradients.
    """
    sizes = {name: p.nbytes for name, p in network.graph.network.named_parameters()}
    return RunMemory(
        start_bytes=round(max(site.present_bytes, *table.parameter_bytes)),
        passing_bytes={
            partition.name: round(max(working, *(sizes[name] for name in partition.parameters), 0))
            for working, partition in zip(table.working_bytes, network.partitions)
        },
        batch_bytes=batch_bytes,
        on_cpu=site.device.type == "cpu",
    )


def plan_again(
    network: CalledNetwork,
    settings: PlanSettings,
    site: Site,
    optimizers: Sequence[Optimizer],
    plan: Plan,
    capacities: Sequence[float],
) -> tuple[Plan, Plan]:
    """Plan a network again at other speeds of the devices, to decide whether new cuts are worth it.

    It is for `Search(replan="epoch")`. The schedule, and whether activations are recomputed, stay
    as in the plan in force.

    Args:
        network: the network, with its profile; see `CalledNetwork.remembered`.
        settings: options of the user, without given cuts.
        site: the devices, as they were found at the start of the run.
        optimizers: optimizers that train the network.
        plan: the plan in force.
        capacities: new relative speed of each device of a replica, by its index.

    Returns:
        A plan with the cuts in force, and a plan with the best cuts; both predicted at these
        speeds.

    Raises:
        PlanError: no placement fits into memory.
    """
    assert site.cluster is not None, "devices that nobody has looked at have no speeds"
    site = replace(site, cluster=site.cluster.with_capacities(capacities))
    fixed = replace(settings, schedule=plan.schedule, recompute=plan.recompute)

    def made(settings: PlanSettings) -> Plan:
        count = plan.microbatches
        found = make_plan(network, count, settings=settings, site=site, optimizers=optimizers)
        return replace(found, split_by=plan.split_by, tried=plan.tried)

    prefix = f"{network.name}." if network.name else ""
    cuts = tuple(prefix + name for name in plan.cuts)
    return made(replace(fixed, allocation=cuts)), made(fixed)


def _replica(
    site: Site, settings: PlanSettings, microbatches: int, batch_bytes: int, table: PartitionTable
) -> Replica:
    """Describe a replica's devices for the search, with the memory that is free for stages.

    Args:
        site: the devices.
        settings: options of the user.
        microbatches: number of micro-batches.
        batch_bytes: bytes that the driver needs for the batch; they are subtracted from its memory.
        table: the partitions; the most memory that one of them uses for its operations is
            subtracted on each device.
    """
    limits = site.limits
    cluster = site.cluster
    rates = site.rates
    if settings.has_copies:
        limits = limits and tuple(map(int, of_slowest(limits, devices_of_copies(settings.copies))))
    # any device may get the partition whose operations use the most memory
    working = round(max(table.working_bytes))
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


def _check(
    table: PartitionTable,
    settings: PlanSettings,
    held: TrainingMemory,
    limits: tuple[int, ...],
    way: ChainSizes,
    batch: int,
    trains: bool,
) -> None:
    """Raise an error with advice if no placement fits into memory; see :func:`check_memory`.

    Args:
        table: table of the partitions.
        settings: options of the user.
        held: memory that the partitions hold in training.
        limits: bytes that each device may use, by its index in the replica.
        way: numbers of stages and micro-batches, and whether activations are recomputed.
        batch: number of samples of a replica's batch.
        trains: whether the network is trained.

    Raises:
        PlanError: no placement fits.
    """
    tried: list[MemoryFit] = []
    # for streamed schedules no other number of micro-batches is advised
    if settings.schedule not in STREAMED:
        ways = [way, replace(way, recompute=False)] if way.recompute else [way]
        chain = settings.contiguous and not settings.has_copies and settings.schedule != "looped"
        tried = [
            MemoryFit.of(
                table,
                each,
                limits,
                batch,
                may_recompute=trains,
                may_go_inside=trains and chain,
            )
            for each in ways
        ]
    # given cuts are not compared with other chains
    searched = isinstance(settings.allocation, str)
    check_memory(
        table,
        held,
        limits,
        recompute=way.recompute,
        tried=tried,
        contiguous=searched and settings.contiguous and settings.schedule != "looped",
    )


def _first_of_stages(network: CalledNetwork, cut_points: Sequence[str]) -> list[str]:
    """Find the partitions at which the user's cut points begin stages.

    Args:
        network: the network. Cut points in other networks are left out, unless none is in this one.
        cut_points: dotted names of modules in the LightningModule.

    Returns:
        For each cut point that is taken, the name of the partition that begins there.

    Raises:
        NetworkError: a cut point is unknown, or the network must not be cut there.
    """
    prefix = f"{network.name}." if network.name else ""
    # of several networks each takes those with its name; without any, an unknown one raises below
    mine = [point for point in cut_points if point.startswith(prefix)]
    points = [point.removeprefix(prefix) for point in mine or cut_points]
    parts, prefix = network.partitions, prefix if mine else ""
    return [parts[find_boundary(parts, point, prefix)].name for point in points]


def plan_within(
    table: PartitionTable,
    settings: PlanSettings,
    replica: Replica,
    batch: int | None = None,
    *,
    trains: bool = True,
    cut_points: Sequence[str] | None = None,
    inside: Replica | None = None,
) -> Plan:
    """Plan stages that fit into memory; choose the schedule and recomputation if they are open.

    Args:
        table: the partitions, with the memory that they keep and that of their activations.
        settings: options of the user.
        replica: the devices.
        batch: number of samples of a replica's batch: if no placement fits, the error then says
            what would fit; None: it does not.
        trains: whether the network is trained.
        cut_points: names of the first partitions of all stages but the first; None: the cuts are
            searched for.
        inside: under schedule `auto`, the devices with the memory that is free if backwards run
            inside of calls, so that this is tried too; None: it is not.

    Raises:
        PlanError: no placement fits, or the cut points are wrong.
    """
    limits, stages, microbatches = replica.memory_limits, replica.stages, replica.microbatches
    # (without micro-batches that follow each other nothing is gained, and counted operations tell
    # neither of time nor of memory)
    if settings.schedule == AUTO and inside and min(stages, microbatches) > 1 and table.is_measured:
        return plan_with_backwards_inside(
            lambda name: plan_within(
                table,
                replace(settings, schedule=name),
                inside if name == INSIDE else replica,
                batch,
                trains=trains,
                cut_points=cut_points,
            )
        )
    if settings.schedule == INSIDE:
        table = table.with_copies_aside()

    def plan_with(recompute: bool) -> Plan:
        way = ChainSizes(
            stages=stages,
            microbatches=microbatches,
            recompute=recompute,
            inside=settings.schedule == INSIDE,
        )
        held = TrainingMemory([round(size) for size in table.kept_bytes])
        if trains:
            held = held_in_training(table, settings, way)
        if batch is not None and limits is not None and held.needed:
            _check(table, settings, held, limits, way, batch, trains)
        planned = replace(table, memory_bytes=held.needed)
        if recompute:
            planned = planned.recomputed()
        elif settings.compiled:  # a compiled stage has a backward that cannot be split
            planned = planned.joint()
        beside_inputs = replace(replica, memory_limits=limits and held.room(limits))
        plan = plan_by_schedule(
            settings.schedule,
            lambda name: plan_stages(
                planned,
                replace(settings, schedule=name),
                beside_inputs,
                cut_points=cut_points,
            ),
            contiguous=settings.contiguous,
            measured=table.is_measured,
        )
        return replace(plan, recompute=recompute)

    return plan_within_memory(
        settings.recompute if stages > 1 and trains else False, plan_with, limits
    )


def plan_by_schedule(
    schedule: str, plan_with: Callable[[str], Plan], *, contiguous: bool, measured: bool
) -> Plan:
    """Make a plan with the given schedule, or choose one under `auto`.

    Under `auto` it is fill-drain, or `zero_bubble` or `looped` if its step is shorter by `MARGIN`.
    Delayed schedules are never chosen, since they change the training; nor are other streamed ones,
    whose demands on the training step a plan cannot check.

    Args:
        schedule: Name of the schedule, or `auto`.
        plan_with: Function that makes the plan with the schedule of a name.
        contiguous: Whether each device has one stage: then `zero_bubble` is tried, else `looped`.
        measured: Whether times were measured; if not, `auto` means fill-drain.
    """
    if schedule != AUTO:
        return plan_with(schedule)
    # the default, which is possible for every network and has the fewest instructions
    best = plan_with("gpipe")
    # one stage has no bubble to shorten; a batch that is not split is computed as on one device, to
    # the last bit, which other orders of its sums are not; counted FLOPs are no seconds to compare
    if 1 in (best.stages, best.microbatches) or not measured:
        return best
    try:
        other = plan_with("zero_bubble" if contiguous else "looped")
    except PlanError:  # for instance too few partitions for `looped`
        return best
    return other if other.step_s < (1 - MARGIN) * best.step_s else best


def plan_with_backwards_inside(plan_with: Callable[[str], Plan]) -> Plan:
    """Make a plan under `auto` for a network whose backwards may run inside of its calls.

    They run there (schedule `1f1b`) if no other schedule fits into memory, or if the others need
    recomputation and take longer. If both are possible without recomputation, the other schedule is
    taken: under it the user's code may read all outputs after the step.

    Args:
        plan_with: Function that makes the plan with the schedule of a name.

    Raises:
        PlanError: There is no placement.
    """
    try:
        best = plan_with(AUTO)
    except PlanError as error:
        try:
            return plan_with(INSIDE)
        except PlanError:
            raise error from None
    if best.recompute:
        with suppress(PlanError):
            other = plan_with(INSIDE)
            if other.step_s < (1 - MARGIN) * best.step_s:
                return other
    return best


def plan_within_memory(
    recompute: bool | Literal["auto"],
    plan_with: Callable[[bool], Plan],
    limits: Sequence[int] | None = None,
) -> Plan:
    """Make a plan, and under `auto` choose recomputation if memory requires it or if it is faster.

    It can be faster if memory determines the cuts: with recomputation stages can be balanced.

    Args:
        recompute: Whether activations are recomputed, or `auto`.
        plan_with: Function that makes the plan, with recomputation (True) or without.
        limits: Bytes that each device may use, by its index in the replica; None: not known.

    Raises:
        PlanError: There is no placement.
    """
    if isinstance(recompute, bool):
        return plan_with(recompute)
    try:
        # without it first: a second forward is about a third more to compute
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
    """Whether memory may have determined the cuts: whether a device is more than half full.

    Args:
        plan: the plan.
        limits: bytes that each device may use, by its index in the replica; if stages have copies,
            one entry for each stage, the last stage's first.
    """
    held = [0] * len(limits)
    for stage, row in enumerate(plan.rows):
        place = (stage + 1) % plan.stages if max(plan.copies) > 1 else row.device
        held[place] += row.memory_bytes or 0
    return any(2 * size > limit for size, limit in zip(held, limits))
