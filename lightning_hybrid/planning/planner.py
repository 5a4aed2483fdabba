"""Plan a network whose costs are known: choose the cuts.

If the user leaves them open, the schedule and whether to recompute activations are chosen here too.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from lightning_hybrid.errors import PlanError
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
    remaining,
    with_peaks,
)
from lightning_hybrid.planning.partition_table import PartitionTable
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
        on_cpu: whether these devices are CPUs.
        cluster: the devices; None: they are taken to be equal, and to have enough memory.
        beside: plans of the networks that are placed on these devices already, and use memory.
        present_bytes: bytes of the network that each device held when its free memory was read;
            they count as free, since a rank frees what other ranks own.
    """

    replicas: int
    stages: int
    backend: str
    on_cpu: bool
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


@dataclass(frozen=True, kw_only=True)
class NetworkCosts:
    """What is to be known of a network before it is planned.

    Attributes:
        table: costs of its partitions for a micro-batch, with the memory that they keep in this
            run.
        largest_bytes: for each partition the size of its largest parameter; 0: it has none.
        input_bytes: size of the network's inputs, per micro-batch.
        samples: number of samples of a micro-batch.
        trains: whether the network is trained.
        may_go_inside: whether its backwards may run inside of its calls, if it is trained.
        cut_points: names of the first partitions of all stages but the first, as the user has given
            them; None: the cuts are searched for.
    """

    table: PartitionTable
    largest_bytes: Sequence[int]
    input_bytes: int
    samples: int
    trains: bool
    may_go_inside: bool
    cut_points: Sequence[str] | None = None


def make_plan(
    network: NetworkCosts, microbatches: int, *, settings: PlanSettings, site: Site
) -> Plan:
    """Make the plan of a network.

    Args:
        network: the network.
        microbatches: number of micro-batches of a replica's batch.
        settings: options of the user.
        site: the devices.

    Returns:
        The plan. If the network is trained and was profiled, its rows have peaks of memory. If
        FLOPs were counted, times are not predicted.

    Raises:
        PlanError: the network cannot be placed on these devices.
    """
    table, trains, cut_points = network.table, network.trains, network.cut_points
    goes_inside = settings.may_go_inside and trains and network.may_go_inside
    # (where no backward can run inside of calls all micro-batches are kept, as under fill-drain)
    if settings.schedule == INSIDE and not goes_inside:
        settings = replace(settings, schedule="gpipe")
    # The driver holds the batch, the network's outputs and their gradients; but of the outputs
    # those of one micro-batch, if backwards run inside of the call.
    given = microbatches * network.input_bytes
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
    batch = microbatches * network.samples
    plan = plan_within(
        table, settings, replica, batch, trains=trains, cut_points=cut_points, inside=inside
    )
    if not table.is_measured:  # counted loads say nothing of times
        return plan.without_times()
    # without training memory does not grow, so that no peaks are given
    if not trains:
        return plan
    batch_bytes = on_driver.get(plan.schedule, on_driver[AUTO])
    columns = zip(table.names, table.working_bytes, network.largest_bytes)
    life = RunMemory(
        start_bytes=round(max(site.present_bytes, *table.parameter_bytes)),
        passing_bytes={name: round(max(working, largest)) for name, working, largest in columns},
        batch_bytes=batch_bytes,
        on_cpu=site.on_cpu,
    )
    return with_peaks(plan, life, site.limits)


def plan_again(
    network: NetworkCosts,
    settings: PlanSettings,
    site: Site,
    plan: Plan,
    capacities: Sequence[float],
) -> tuple[Plan, Plan]:
    """Plan a network again at other speeds of the devices, to decide whether new cuts are worth it.

    It is for `Search(replan="epoch")`. The schedule, and whether activations are recomputed, stay
    as in the plan in force.

    Args:
        network: the network, which is trained, without given cuts.
        settings: options of the user, without given cuts.
        site: the devices, as they were found at the start of the run.
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

    def made(network: NetworkCosts, settings: PlanSettings) -> Plan:
        found = make_plan(network, plan.microbatches, settings=settings, site=site)
        return replace(found, split_by=plan.split_by)

    cuts = plan.cuts
    as_now = made(replace(network, cut_points=cuts), replace(fixed, allocation=cuts))
    return as_now, made(network, fixed)


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
