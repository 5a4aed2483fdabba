"""Choose the sizes that the user has left open: numbers of replicas, stages and micro-batches.

Every replica takes a batch of its own, as under DDP, so that R replicas train on R batches in a
step; or the user's code divides the batch by the number of replicas, and they train on one. Sizes
are therefore compared by the predicted time of a step divided by its number of batches: the time of
an epoch, up to a constant. How shapes are ranked is in `shapes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.run_cluster import (
    Cluster,
    Device,
    Rates,
    communicators,
    make_cluster,
    memory_of_rank,
)
from lightning_hybrid.planning.shapes import (
    WORTH_STAGES,
    Shape,
    ShapeRequest,
    rank_shapes,
    recommended,
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of all ranks, and costs of communication between them.

    Attributes:
        devices: one entry for each rank, in the order of the ranks.
        capacity: relative speed of each rank's device, from the user; None: as measured.
        bandwidth_bytes_per_s: bandwidth of a link between two stages.
        rates: costs of messages, all-reduces and optimizer steps.
    """

    devices: tuple[Device, ...]
    capacity: tuple[float, ...] | None
    bandwidth_bytes_per_s: float
    rates: Rates

    def cluster(self, replicas: int, stages: int, drivers: Sequence[int] = ()) -> Cluster:
        """Give the ranks their places in `replicas` replicas of `stages` devices each.

        Args:
            replicas: number of replicas.
            stages: number of devices of each replica.
            drivers: the ranks that must be drivers (run the script): one for each replica, rank 0
                among them. Empty: the speeds of the devices decide.
        """
        cluster = make_cluster(self.devices, replicas, stages, self.capacity, drivers)
        bandwidth = self.bandwidth_bytes_per_s
        return replace(cluster, rates=self.rates, bandwidth_bytes_per_s=bandwidth)

    def described(self, present_bytes: int = 0) -> ClusterDescription:
        """Describe the devices for `rank_shapes`: as a cluster in which all links are equal.

        Args:
            present_bytes: bytes of the networks that were on each device when its free memory was
                read; they count as free, since a rank frees what other ranks own.
        """
        devices, count = self.devices, len(self.devices)
        # the shape is not known yet: communicators of the one that has the most
        most = max(communicators(count // s, s) for s in range(1, count + 1) if count % s == 0)
        memory = [memory_of_rank(device, devices, most) for device in devices]
        return ClusterDescription(
            name="the devices of this run",
            devices=tuple(
                DeviceSpec(
                    name=device.name,
                    flops_per_s=speed,
                    memory_bytes=None if None in memory else (free or 0) + present_bytes,
                )
                for device, speed, free in zip(devices, self.cluster(count, 1).speeds, memory)
            ),
            levels=(
                Level(
                    name="links",
                    devices=count,
                    bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
                    latency_s=self.rates.message_s,
                ),
            ),
            unit=1.0,
            rates=self.rates,
        )


@dataclass(frozen=True, kw_only=True)
class ChosenSizes:
    """The chosen sizes, and alternatives.

    Attributes:
        best: the sizes with the shortest time of a batch. Replicas of one stage are preferred,
            unless several stages take at most 0.95 (:data:`WORTH_STAGES`) of their time.
        others: for each other number of stages the best sizes that fit into memory, the fastest
            first; the times of much slower ones are estimates.
        alone_s: predicted seconds of a batch on a single device.
    """

    best: Shape
    others: tuple[Shape, ...]
    alone_s: float

    def describe(self) -> str:
        """Describe the choice to the user: sizes, their predicted time, and the next best sizes."""
        best = self.best
        lines = [f"Chosen for {len(best.arrangement.used)} devices: {_predicted(best)}"]
        for other in self.others[:2]:
            lines.append(f"Next: {_predicted(other)}")
            if other.batch_s < best.batch_s:
                lines[-1] += f" Stages are taken where they save {1 - WORTH_STAGES:.0%} or more."
        if self.alone_s < best.batch_s:
            lines.append(
                f"One device alone is predicted to take {_seconds(self.alone_s)} for a batch, less "
                "than any use of several: consider Trainer(devices=1)."
            )
        return "\n".join(lines)


def _predicted(shape: Shape) -> str:
    text, replicas = f"{shape}. Predicted step: {_seconds(shape.step_s)}", shape.sizes.replicas
    return (
        f"{text} for {replicas} batches, {_seconds(shape.batch_s)} each."
        if replicas > 1
        else f"{text}."
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def fastest_sizes(
    machine: Machine,
    networks: Sequence[Callable[[int], PartitionTable]],
    batch: int,
    asked: ShapeRequest,
    present_bytes: int = 0,
) -> ChosenSizes:
    """Choose the sizes with the shortest predicted time of a batch.

    Args:
        machine: the devices.
        networks: for each network a function from the number of micro-batches to the table of its
            partitions; a call may measure them.
        batch: number of samples in the batch of a single replica.
        asked: which sizes are open, and which are allowed.
        present_bytes: bytes of the networks that were on each device when its free memory was read;
            they count as free.

    Raises:
        PlanError: no sizes are allowed, or the networks fit into memory with none of them.
    """
    tables = [cache(network) for network in networks]
    # the costs for micro-batches of so many samples, by their number
    costs = [cache(lambda samples, t=table: t(-(-batch // samples))) for table in tables]
    shapes = rank_shapes(costs, machine.described(present_bytes), batch, asked)
    if not shapes:
        raise PlanError(
            f"no numbers of replicas and stages of {len(machine.devices)} devices are allowed "
            "here, or the network has fewer partitions than they have stages"
        )
    best = recommended(shapes)
    others: dict[int, Shape] = {}
    for shape in shapes:
        if shape.fits and shape.sizes.stages != best.sizes.stages:
            others.setdefault(shape.sizes.stages, shape)
    whole = [table(1) for table in tables]
    alone_s = sum(sum(t.loads) for t in whole)
    alone_s += machine.rates.update_s_per_byte * sum(sum(t.gradient_bytes) for t in whole)
    return ChosenSizes(best=best, others=tuple(others.values()), alone_s=alone_s)
