"""Make the `StepProblem` of a shape on a described cluster: costs, memory, links, all-reduces.

If a replica has S devices, replica r has the devices r S .. r S + S - 1 of the description, in this
order. All replicas have the same cuts, so for each stage the slowest device, the smallest memory
and the slowest link count.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lightning_hybrid.planning.cluster_description import ClusterDescription, Level
from lightning_hybrid.planning.copied_stages import CopiedStages, devices_of_copies, of_slowest
from lightning_hybrid.planning.memory_check import ChainSizes
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem

CostsOf = Callable[[int], PartitionTable]
"""A function from the number of samples of a micro-batch to the table of the partitions, with the
times of a device of speed 1, the first of a cluster. A call may measure."""


def in_training(
    costs: PartitionTable, way: ChainSizes, reduce_s: Sequence[float]
) -> PartitionTable:
    """Make a copy of a table with the memory and the all-reduces of a step in training.

    With recomputation each backward includes a forward.

    Args:
        costs: table of the partitions for one micro-batch.
        way: numbers of stages and micro-batches, and options that change the memory.
        reduce_s: for each partition the seconds of the all-reduce of its gradients; empty: none.
    """
    held: Sequence[float] = costs.held_bytes(1 if way.recompute else way.alive)
    if way.inside and way.stages > 1:
        costs = costs.with_copies_aside()
        held = [size + aside for size, aside in zip(held, costs.gradient_bytes)] or held
    table = replace(costs, memory_bytes=held, reduce_s=reduce_s)
    return table.recomputed() if way.recompute else table


def problem_of(
    table: PartitionTable,
    cluster: ClusterDescription,
    way: ChainSizes,
    links: LinkCosts,
    replica: int | None,
) -> StepProblem:
    """Make the step problem of a shape that uses all devices of a cluster.

    All replicas wait for each other, so each ``pp_rank`` has the speed of its slowest device and
    the smallest memory of its devices.

    Args:
        table: Table of the partitions, from `in_training`.
        cluster: The cluster.
        way: Numbers of stages and micro-batches. If activations are recomputed, memory for the
            inputs that a device keeps (at most the bytes of the widest cut for each micro-batch it
            has begun with) is taken off.
        links: Links of a replica, from `links_of`.
        replica: Number of the replica whose speeds and memory are taken; None: the least of all
            replicas.
    """
    speeds, limits, devices = cluster.relative_speeds, cluster.memory_limits, way.stages
    if replica is not None:
        mine = slice(replica * devices, (replica + 1) * devices)
        speeds, limits = speeds[mine], limits and limits[mine]
    if way.recompute:
        kept = way.alive * max(table.cut_bytes, default=0)
        limits = limits and tuple(max(0.0, limit - kept) for limit in limits)
    return StepProblem(
        table=table,
        speeds=[min(speeds[k::devices]) for k in range(devices)],
        links=links,
        microbatches=way.microbatches,
        memory_limits=[min(limits[k::devices]) for k in range(devices)] if limits else (),
    )


def links_of(cluster: ClusterDescription, devices: int) -> LinkCosts:
    """Find the links between the devices of a replica, by their indices in it.

    Each link is the slowest of those that the replicas have at the same place.

    Args:
        cluster: the cluster, all of whose devices are used.
        devices: number of devices of a replica.
    """
    places = cluster.places or range(len(cluster.devices))
    ranks = np.asarray(places).reshape(-1, devices)
    seconds, latency = np.zeros((devices, devices)), np.zeros((devices, devices))
    if devices > 1:
        # from the outermost level, which joins all devices, to the innermost
        for level in reversed(cluster.levels):
            groups = ranks // level.devices
            # replicas with the same pattern of groups have the same links
            patterns = np.unique(groups - groups[:, :1], axis=0)
            joined = np.ones((devices, devices), dtype=bool)
            for row in patterns:
                joined &= row[:, None] == row[None, :]
            seconds[joined] = 1 / level.bandwidth_bytes_per_s
            latency[joined] = level.latency_s
    return LinkCosts(seconds_per_byte=seconds.tolist(), latency_s=latency.tolist())


def ring_s(level: Level | None, size_bytes: float, replicas: int, sharers: int = 1) -> float:
    """Predict the seconds of a ring all-reduce.

    Args:
        level: level of links that joins the ranks; None: there is one rank, and the result is 0.
        size_bytes: bytes of the tensor.
        replicas: number of ranks in the ring.
        sharers: number of rings that share a link at the same time.
    """
    if level is None or replicas < 2:
        return 0.0
    carried = 2 * (replicas - 1) / replicas * size_bytes * sharers
    return carried / level.bandwidth_bytes_per_s + 2 * (replicas - 1) * level.latency_s


Ring = tuple[Level | None, int]
"""The level of links that joins the ranks of an all-reduce (None: there is one rank); and the
number of rings that share a link."""


def ring_of(cluster: ClusterDescription, devices: int) -> Ring:
    """Find the slowest of the rings in which the replicas of each stage average their gradients.

    Args:
        cluster: the cluster, all of whose devices are used.
        devices: number of devices of a replica.

    Returns:
        The outermost level of links that a ring uses (None: there is one replica), and the number
        of rings that share a link of it.
    """
    ranks = range(len(cluster.devices))
    levels = [cluster.level(ranks[k::devices]) for k in range(devices)]
    level = max(levels, key=lambda level: level.devices if level else 0)
    return level, min(levels.count(level), _inside(cluster, level))


def _inside(cluster: ClusterDescription, level: Level | None) -> int:
    """Number of devices that share a link of a level: those of a group of the next inner level.

    A ring of ranks goes into such a group and out of it once. For the innermost level, and for
    None, it is 1.
    """
    place = cluster.levels.index(level) if level is not None else 0
    return cluster.levels[place - 1].devices if place else 1


def rings_s(ring: Ring, sizes: Sequence[float], owners: int) -> tuple[float, ...]:
    """For each partition, the seconds that its gradients add to the all-reduce.

    Empty if the ring has no level of links. The first number has the latency of the ring, and the
    others have none: such a number is not what an all-reduce of that partition alone would take.

    Args:
        ring: the ring, from `ring_of`.
        sizes: bytes of the gradients of each partition, in order.
        owners: number of ranks in the ring.
    """
    level, sharers = ring
    if level is None:
        return ()
    times = [ring_s(level, size, owners, sharers) for size in sizes]
    waits = ring_s(level, 0.0, owners)
    # the latency is counted once, with the first partition, whose all-reduce begins last
    return (*times[:1], *(time - waits for time in times[1:]))


def with_copies(
    problem: StepProblem,
    copies: tuple[int, ...],
    cluster: ClusterDescription,
) -> CopiedStages:
    """Make the problem of stages with copies from that of a chain on the same devices.

    Args:
        problem: The problem of a chain, with one stage on each device of a replica.
        copies: By stage, its number of copies; their sum is the number of devices of a replica.
        cluster: The cluster, for the all-reduces over all ranks of each stage.
    """
    owners, table = devices_of_copies(copies), problem.table
    if len(cluster.devices) == problem.m:  # copies average too, as several replicas do anyway
        held = [size + copy for size, copy in zip(table.memory_bytes, table.gradient_bytes)]
        table = replace(table, memory_bytes=held)
    groups = [
        [k + d for k in range(0, len(cluster.devices), problem.m) for d in devices]
        for devices in owners
    ]
    levels = [cluster.level(ranks) if len(ranks) > 1 else None for ranks in groups]
    after = []
    for ranks, level in zip(groups, levels):
        sharers = min(levels.count(level), _inside(cluster, level))
        after.append(
            (
                rings_s((level, sharers), table.gradient_bytes, len(ranks)) or [0.0] * problem.n,
                table.step_s or [0.0] * problem.n,
            )
        )
    limits = problem.memory_limits
    return CopiedStages(
        chain=StepProblem(
            table=table,
            speeds=of_slowest(problem.speeds, owners),
            links=_of_copies(problem.links, owners),
            microbatches=problem.microbatches,
            memory_limits=of_slowest(limits, owners) if limits else (),
        ),
        copies=copies,
        speeds=problem.speeds,
        links=problem.links,
        after=after,
    )


def _of_copies(links: LinkCosts, owners: Sequence[Sequence[int]]) -> LinkCosts:
    """Combine the links between the copies of two stages into one link between the stages.

    The slowest link counts. Each of r copies sends on a link of its own, so that a message takes
    1/r of the time; forward the copies of the one stage send, backward those of the other, and the
    mean of both is taken.

    Args:
        links: links between all devices of a replica.
        owners: by stage, the devices of its copies.

    Returns:
        The links between the stages: row and column 0 are the last stage, the driver's; k > 0 is
        stage k - 1.
    """
    stages = [owners[-1], *owners[:-1]]

    def slowest(
        table: Sequence[Sequence[float]], here: Sequence[int], there: Sequence[int]
    ) -> float:
        return max(table[i][j] for i in here for j in there)

    return LinkCosts(
        seconds_per_byte=[
            [
                slowest(links.seconds_per_byte, here, there) * (1 / len(here) + 1 / len(there)) / 2
                for there in stages
            ]
            for here in stages
        ],
        latency_s=[[slowest(links.latency_s, here, there) for there in stages] for here in stages],
    )


def unlimited(problem: StepProblem) -> StepProblem:
    return replace(problem, memory_limits=())
