"""From a captured network to a plan: profile its partitions, choose the cuts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.network import (
    NetworkGraph,
    NetworkPartition,
    Profile,
    cached,
    count,
    find_boundary,
    measure,
)
from lightning_hybrid.planning.automatic_choices import AUTO, plan_by_schedule, plan_within_memory
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.memory import (
    check_memory,
    in_flight,
    optimizer_bytes,
    remaining,
)
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.peaks import Life, with_peaks
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.rates import Rates
from lightning_hybrid.planning.search import Method, Objective, plan_stages
from lightning_hybrid.planning.would_fit import Fit, Footprint, Way
from lightning_hybrid.schedules import SCHEDULES, STREAMED, DelayedWeights

BANDWIDTH_BYTES_PER_S = {"gloo": 1e9, "nccl": 2e10}
"""What a link between two ranks is taken to carry where it was not measured. It weighs the bytes
that cross a cut against the seconds of computation; gloo is 10 Gbit/s, NCCL a PCIe bus."""


@dataclass(frozen=True)
class PlanSettings:
    """What the user has asked for.

    Attributes:
        schedule: name of the schedule, or ``"auto"``.
        allocation: ``"gabra"``, ``"exact"``, ``"merging"``, or cut points as named in the
            LightningModule.
        objective: ``"step"``, ``"makespan"`` or ``"profit"``.
        seed: of the genetic algorithm.
        contiguous: whether each device gets one stage.
        recompute: whether stages keep no activations, and run their forward again; ``"auto"``: if
            nothing else fits.
        compiled: whether stages are compiled, whose backward is one.
        delayed_weights: what the backward of a batch computes with under a delayed schedule.
        shards_states: whether replicas divide the state of the optimizer.
    """

    schedule: str
    allocation: Method | tuple[str, ...]
    objective: Objective
    seed: int
    contiguous: bool = True
    recompute: bool | Literal["auto"] = "auto"
    compiled: bool = False
    delayed_weights: DelayedWeights = "stash"
    shards_states: bool = False

    @property
    def method(self) -> Method:
        """How cuts are searched, where none are given."""
        return self.allocation if isinstance(self.allocation, str) else "gabra"


def make_plan(
    name: str,
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    microbatches: int,
    *,
    settings: PlanSettings,
    replicas: int,
    stages: int,
    backend: str,
    device: torch.device,
    cluster: Cluster | None = None,
    optimizers: Sequence[Optimizer] | None = None,
    beside: Iterable[Plan] = (),
    present_bytes: int = 0,
    advance: Callable[[int, int], None] | None = None,
) -> Plan:
    """Measure the partitions on a real micro-batch and let the allocation choose the cuts.

    With given cut points nothing is measured: the loads are counted, the time is not predicted.

    Args:
        name: dotted name of the network in the LightningModule.
        graph: of the network.
        partitions: of the graph.
        leaves: the tensors of a micro-batch.
        microbatches: their number.
        settings: what the user has asked for.
        replicas: number of replicas.
        stages: number of devices of a replica.
        backend: ``"gloo"`` or ``"nccl"``.
        device: where to measure.
        cluster: the devices; None: they are taken to be equal, and large enough.
        optimizers: that will train it; None: it is not trained in this run, so that it needs room
            for its parameters alone.
        beside: plans of the networks that are on these devices already, and keep their memory.
        present_bytes: of the network, which each device had when it was asked what it may take, and
            gives back where another one owns it.
        advance: hears which partition is measured, from 1, and how many there are.

    Raises:
        NetworkError: a cut point is unknown, or the network may not be cut there.
        PlanError: the network cannot be placed on that many devices.
    """
    first = None
    if isinstance(settings.allocation, tuple):
        first = _first_of_stages(name, partitions, settings.allocation)
        profile = count(graph, partitions)
    else:
        measured = partial(measure, graph, partitions, leaves, device=device, advance=advance)
        profile = cached(measured, graph, partitions, leaves, device)
    bandwidth = cluster and cluster.bandwidth_bytes_per_s
    rates = None if cluster is None else cluster.rates
    table = _table(graph, partitions, profile, rates if optimizers is not None else None, replicas)
    make = partial(
        plan_stages,
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        method=settings.method,
        objective=settings.objective,
        capacities=None if cluster is None else cluster.capacities,
        bandwidth_bytes_per_s=bandwidth or BANDWIDTH_BYTES_PER_S[backend],
        latency_s=0.0 if rates is None else rates.message_s,
        cut_points=first,
        contiguous=settings.contiguous,
        seed=settings.seed,
    )
    if optimizers is not None and profile.is_measured:
        sharers = replicas if settings.shards_states else 1
        profile = profile.with_optimizer(
            partitions, optimizer_bytes(graph.network, optimizers, sharers)
        )
        profile = profile if replicas == 1 else profile.averaged()
    limits = remaining(None if cluster is None else cluster.memory_limits, beside)
    limits = limits and tuple(limit + present_bytes for limit in limits)
    passed = sum(leaf.nbytes for leaf in leaves) + 2 * profile.partitions[-1].output_bytes
    batch_bytes = microbatches * passed if optimizers is not None else 0
    # the driver has the batch, and what the network makes of it
    for_stages = limits and (max(0, limits[0] - batch_bytes), *limits[1:])
    working = max(row.working_bytes for row in profile.partitions)
    for_stages = for_stages and tuple(max(0, limit - working) for limit in for_stages)
    room = partial(
        _memory,
        profile,
        microbatches,
        for_stages,
        settings,
        stages,
        trains=optimizers is not None,
        batch=microbatches * (graph.batch_of(leaves) or 1),
    )
    plan = plan_within_memory(
        settings.recompute if stages > 1 and optimizers is not None else False,
        lambda again: _plan(settings, profile, table, make, room(again), again),
        for_stages,
    )
    if optimizers is None or not profile.is_measured:
        return plan
    sizes = {name: p.nbytes for name, p in graph.network.named_parameters()}
    life = Life(
        start_bytes=max(present_bytes, max(row.parameter_bytes for row in profile.partitions)),
        passing_bytes={
            row.name: max(row.working_bytes, *(sizes[name] for name in partition.parameters), 0)
            for row, partition in zip(profile.partitions, partitions)
        },
        batch_bytes=batch_bytes,
        on_cpu=device.type == "cpu",
    )
    return with_peaks(plan, life, limits)


def _table(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    profile: Profile,
    rates: Rates | None,
    replicas: int,
) -> PartitionTable:
    """What the search knows of each partition; with rates, what follows the backward too."""
    table = PartitionTable.of(graph, partitions, profile)
    if rates is None:
        return table
    reduce_s, step_s = rates.after_backward(table.gradient_bytes, replicas)
    return replace(table, reduce_s=reduce_s, step_s=step_s)


def _plan(
    settings: PlanSettings,
    profile: Profile,
    table: PartitionTable,
    make: Callable[..., Plan],
    room: tuple[list[int] | None, tuple[int, ...] | None],
    recompute: bool,
) -> Plan:
    """A plan of stages that compute their activations again, or do not."""
    memory_bytes, limits = room
    table = replace(table, memory_bytes=memory_bytes)
    if recompute:
        table = table.recomputed()
    elif settings.compiled:  # which cannot be gone back through in parts
        table = table.joint()
    plan = plan_by_schedule(
        settings.schedule,
        lambda name: make(table, memory_limits=limits, schedule=name),
        contiguous=settings.contiguous,
        measured=profile.is_measured,
    )
    plan = replace(plan, recompute=recompute)
    return plan if profile.is_measured else plan.without_times()


def _first_of_stages(
    name: str, partitions: Sequence[NetworkPartition], cut_points: Sequence[str]
) -> list[str]:
    """The first partition of each next stage of a network, where the user has given cut points.

    Raises:
        NetworkError: one is unknown, or the network may not be cut there.
    """
    prefix = f"{name}." if name else ""
    # with several networks each has its own; one that names none of them is an error below
    mine = [point for point in cut_points if point.startswith(prefix)]
    points = [point.removeprefix(prefix) for point in mine or cut_points]
    prefix = prefix if mine else ""
    return [partitions[find_boundary(partitions, point, prefix)].name for point in points]


@dataclass(frozen=True)
class _Held:
    """What devices hold.

    Attributes:
        needed: bytes per partition.
        most: passes of which a partition holds the activations at once.
        kept_inputs: bytes of inputs of stages that a device keeps beside.
    """

    needed: list[int]
    most: int = 1
    kept_inputs: int = 0


def _held(
    profile: Profile, microbatches: int, settings: PlanSettings, stages: int, *, recompute: bool
) -> _Held:
    """What devices hold in training."""
    # that of all exact schedules is the same
    name = "gpipe" if settings.schedule == AUTO else settings.schedule
    most, kept_inputs = in_flight(SCHEDULES[name](2, microbatches)), 0
    if recompute:
        most, kept_inputs = 1, most * _widest_cut(profile)
    copies = 0  # of the weights of a stage
    streamed = STREAMED.get(settings.schedule)
    if streamed is not None:
        ahead = streamed.look_aheads(stages)[0]  # of the first stage, which has the most
        weights = settings.delayed_weights if streamed.delayed else None
        if weights == "recompute":
            kept_inputs = ahead * _widest_cut(profile)
        else:
            most *= 1 + ahead
        copies = ahead if weights == "stash" else 0
    needed = [p.memory_bytes(most) + copies * p.gradient_bytes for p in profile.partitions]
    return _Held(needed, most, kept_inputs)


def _memory(
    profile: Profile,
    microbatches: int,
    limits: tuple[int, ...] | None,
    settings: PlanSettings,
    stages: int,
    recompute: bool,
    *,
    trains: bool,
    batch: int,
) -> tuple[list[int] | None, tuple[int, ...] | None]:
    """What each partition holds, and what the devices may take, as far as that is known."""
    if not trains:
        held = _Held([p.parameter_bytes for p in profile.partitions])
    elif not profile.is_measured:
        return None, None
    else:
        held = _held(profile, microbatches, settings, stages, recompute=recompute)
    if limits is None:
        return held.needed, None
    tried: list[Fit] = []
    if settings.schedule not in STREAMED:
        footprint = _footprint(profile, microbatches, batch, trains=trains)
        ways = (
            Way(stages=stages, microbatches=microbatches, recompute=again)
            for again in ([True, False] if recompute else [False])
        )
        tried = [Fit(way=way, footprint=footprint, limits=limits) for way in ways]
    limits = tuple(max(0, limit - held.kept_inputs) for limit in limits)
    searched = isinstance(settings.allocation, str)
    check_memory(
        profile,
        held.needed,
        limits,
        held.most,
        recompute=recompute,
        tried=tried,
        contiguous=searched and settings.contiguous and settings.schedule != "looped",
    )
    return held.needed, limits


def _widest_cut(profile: Profile) -> int:
    """Bytes of the largest input that a stage may have."""
    return max((row.output_bytes for row in profile.partitions[:-1]), default=0)


def _footprint(profile: Profile, microbatches: int, batch: int, *, trains: bool) -> Footprint:
    """What the whole batch of a replica holds."""
    rows = profile.partitions
    return Footprint(
        kept_bytes=[r.memory_bytes(0) if trains else r.parameter_bytes for r in rows],
        activation_bytes=[microbatches * r.activation_bytes if trains else 0 for r in rows],
        crossing_bytes=microbatches * _widest_cut(profile),
        batch=batch,
        may_recompute=trains,
    )
