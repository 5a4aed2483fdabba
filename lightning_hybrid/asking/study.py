"""Study a network on a cluster, for the commands `plan` and `simulate`: how fast each shape is.

A shape is the numbers of replicas, devices, stages and micro-batches of a run.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from lightning_hybrid.asking.partition_costs import counted_parts, measured_parts
from lightning_hybrid.asking.target import (
    Target,
    add_target_options,
    call_for_real,
    call_on_paper,
    make_optimizer,
    read_target,
)
from lightning_hybrid.graph import network_partitions, why_whole
from lightning_hybrid.planning import (
    AUTO,
    ClusterDescription,
    CostsOf,
    PlanSettings,
    Shape,
    ShapeRequest,
    rank_shapes,
    speedup,
)
from lightning_hybrid.profiling import device_name, optimizer_bytes


@dataclass(frozen=True)
class Study:
    """A network, a cluster, and the costs of the network's partitions on its devices.

    Attributes:
        target: the network, as the user has named it.
        cluster: the cluster, with all devices.
        batch: number of samples of a replica in a step.
        splits: function that tells whether the batch can be split into a number of micro-batches.
        costs_of: function from the number of samples of a micro-batch to the costs of all
            partitions, with times of the cluster's first device.
        origin: sentences for the user on where the times come from.
        inside: whether backwards may run inside of the network's calls (schedule ``"1f1b"``).
    """

    target: Target
    cluster: ClusterDescription
    batch: int
    splits: Callable[[int], bool]
    costs_of: CostsOf
    origin: str
    inside: bool = False

    def shapes(self, devices: int) -> list[Shape]:
        """Return all shapes for the first devices of the cluster, the best first; see `Shape`.

        Shapes that do not fit into memory come last. A call may measure the network.

        Args:
            devices: number of devices; the first devices of the cluster are taken.
        """
        asked = ShapeRequest(
            settings=PlanSettings(schedule=AUTO),
            splits=self.splits,
            inside=(self.inside,),
            wide=True,
        )
        return rank_shapes([self.costs_of], self.cluster.take(devices), self.batch, asked)

    @cached_property
    def one_device_s(self) -> float:
        """Predicted seconds of a step of `batch` samples on the first device alone.

        That is with the fastest number of micro-batches. Memory is not limited: the network may
        need more than this device has.
        """
        return min(shape.step_s for shape in self.shapes(1))

    def speed_up(self, shape: Shape) -> float:
        """Samples per second of a shape, divided by those of the first device alone (Eq. 14).

        Args:
            shape: a shape from `shapes`.
        """
        return speedup(self.one_device_s / self.batch, 1 / shape.samples_per_s)


def add_study_options(parser: argparse.ArgumentParser) -> None:
    """Add to a parser the options that the commands `plan` and `simulate` have in common."""
    add_target_options(parser)
    parser.add_argument(
        "--cluster",
        default="p3.16xlarge",
        help="YAML file of a cluster, or a shipped one: p3.16xlarge (the default), dgx-h100, "
        "8x8-a100, workstation, cpu-processes; `doctor` writes one of this machine",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run the network's parts on this machine instead of counting their operations; the "
        "other devices are then as fast as the cluster says relative to the first",
    )
    parser.add_argument(
        "--optimizer",
        default="Adam",
        metavar="NAME",
        help="of torch.optim, for the memory of its state: Adam (the default), 'SGD(momentum=0.9)'",
    )
    parser.add_argument(
        "--shard-states",
        action="store_true",
        help="replicas divide that state, as replicas=Equal(shard_states=True) does",
    )


def make_study(options: argparse.Namespace) -> Study:
    """Read the cluster, capture the network, and prepare to count or measure its partitions.

    Args:
        options: what the parser has made of the options of `add_study_options`.

    Raises:
        PlanError: an option, the cluster or the network is refused.
    """
    # the cluster first, which is fast, so that a misspelt name is refused at once
    cluster = ClusterDescription.load(options.cluster)
    target = read_target(options)
    graph, leaves = (call_for_real if options.measure else call_on_paper)(target)
    partitions = network_partitions(graph)
    optimizer = make_optimizer(options.optimizer, graph.network)
    state: Mapping[str, int] = optimizer_bytes(graph.network, [optimizer])
    batch = graph.batch_of(leaves) or 1
    if options.measure:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        costs_of = measured_parts(
            graph,
            partitions,
            leaves,
            device,
            state,
            divides_states=options.shard_states,
        )
        threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        origin = (
            f"Measured on this machine ({device_name(device)}{threads}), taken for the first "
            f"device of {cluster.name}; an optimizer step of average cost included, loading and "
            "your code not."
        )
    else:
        # times are those of the first device; others follow by their relative speed
        rate = cluster.devices[0].flops_per_s
        costs_of = counted_parts(
            graph,
            partitions,
            rate,
            state,
            divides_states=options.shard_states,
        )
        origin = (
            f"Not measured: counted operations at the rate that cluster {cluster.name!r} states "
            f"({rate / 1e12:.4g} TFLOP/s on {cluster.devices[0].name}), which no network reaches. "
            "It compares shapes; for seconds use --measure. A micro-batch of half the samples is "
            "taken to cost half; optimizer step, loading and your code are left out."
        )

    def splits(microbatches: int) -> bool:
        return why_whole(graph, leaves, microbatches) is None

    # (counted operations do not tell which schedule is the fastest)
    inside = options.measure and not graph.no_shares
    return Study(target, cluster, batch, splits, costs_of, origin, inside)
