"""Times and sizes of a network's partitions, from which plans are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_hybrid.errors import PlanError
from lightning_hybrid.graph import NetworkGraph, NetworkPartition, Profile
from lightning_hybrid.planning.measure import measure
from lightning_hybrid.planning.plan import StagePlan
from lightning_hybrid.planning.profile_cache import cached
from lightning_hybrid.planning.step_time import TIMES, StepCosts


@dataclass(frozen=True)
class TiedWeight:
    """A weight that several partitions use.

    Attributes:
        size_bytes: its size.
        partitions: their numbers, rising.
    """

    size_bytes: float
    partitions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PartitionTable:
    """Times and sizes of n network partitions, in order, at the size of a micro-batch.

    Times are those of a device of speed 1, in seconds; sizes are in bytes. Empty lists are not
    known, or not counted; an empty list for a part of a split backward means half of the backward.

    Attributes:
        forward_s: times of the forward of a micro-batch.
        backward_s: times of the backward of a micro-batch.
        cut_bytes: n - 1 sizes of the tensors that cross the cut after a partition, per micro-batch.
        names: names of the partitions: of the first module of each.
        parameters: numbers of parameter elements.
        layers: numbers of layers.
        reduce_s: times of the all-reduce of gradients over the replicas.
        step_s: times of the optimizer step.
        memory_bytes: memory that a partition holds in training, with the activations of all
            micro-batches that are held at once.
        gradient_bytes: sizes of the gradients.
        kept_bytes: sizes of parameters, gradients and optimizer state together.
        state_bytes: the part of `kept_bytes` that is optimizer state which replicas divide; empty:
            they do not.
        activation_bytes: sizes of the activations held between forward and backward, per
            micro-batch.
        input_part_s: times of the input part of a split backward, for `zero_bubble`.
        weight_part_s: times of the weight part of a split backward; None if it cannot be split.
        output_bytes: size of the network's outputs, per micro-batch.
        tied: weights that several partitions use.

    Raises:
        PlanError: lists of unequal length.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    cut_bytes: Sequence[float]
    names: Sequence[str] = ()
    parameters: Sequence[int] = ()
    layers: Sequence[int] = ()
    reduce_s: Sequence[float] = ()
    step_s: Sequence[float] = ()
    memory_bytes: Sequence[float] = ()
    gradient_bytes: Sequence[float] = ()
    kept_bytes: Sequence[float] = ()
    state_bytes: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    input_part_s: Sequence[float] = ()
    weight_part_s: Sequence[float | None] = ()
    output_bytes: float = 0.0
    tied: Sequence[TiedWeight] = ()

    def __post_init__(self) -> None:
        n = len(self.forward_s)
        for name in self.__dataclass_fields__:
            if name in ("output_bytes", "tied"):
                continue
            values = getattr(self, name)
            # there is a cut between two partitions, and none after the last
            needed = n - 1 if name == "cut_bytes" else n
            is_given = len(values) or name in ("backward_s", "cut_bytes")
            if is_given and len(values) != needed:
                raise PlanError(
                    f"{name} has {len(values)} entries, {needed} are needed for {n} partitions"
                )

    @classmethod
    def of(
        cls,
        graph: NetworkGraph,
        partitions: Sequence[NetworkPartition],
        profile: Profile,
        *,
        share: float = 1.0,
        seconds: float = 1.0,
        divides_states: bool = False,
    ) -> "PartitionTable":
        """Make the table of a profile.

        Args:
            graph: graph of the network.
            partitions: partitions of the graph.
            profile: profile of the partitions.
            share: size of the micro-batch, as a fraction of the profile's.
            seconds: seconds per unit of the profile's times; the unit is a FLOP if FLOPs were
                counted instead of times measured.
            divides_states: whether replicas divide the optimizer state.
        """
        weights = dict(graph.network.named_parameters())
        sizes = {name: p.numel() for name, p in weights.items()}
        uses: dict[str, list[int]] = {}
        for number, partition in enumerate(partitions):
            for name in partition.parameters:
                uses.setdefault(name, []).append(number)
        rows, unit_s = profile.partitions, share * seconds
        # None if the backward of a partition cannot be split
        weight_parts = [row.parts[1] for row in rows]
        return cls(
            names=[partition.name for partition in partitions],
            forward_s=[unit_s * row.forward for row in rows],
            backward_s=[unit_s * row.backward for row in rows],
            # the outputs of the last partition cross no cut
            cut_bytes=[round(share * row.output_bytes) for row in rows[:-1]],
            parameters=[sum(sizes[n] for n in partition.parameters) for partition in partitions],
            layers=[len(partition.layers) for partition in partitions],
            gradient_bytes=[row.gradient_bytes for row in rows],
            kept_bytes=[row.memory_bytes(0) for row in rows],
            state_bytes=[row.optimizer_bytes for row in rows] if divides_states else (),
            activation_bytes=[round(share * row.activation_bytes) for row in rows],
            input_part_s=[unit_s * row.parts[0] for row in rows],
            weight_part_s=[None if part is None else unit_s * part for part in weight_parts],
            output_bytes=round(share * rows[-1].output_bytes),
            tied=[
                TiedWeight(weights[name].nbytes, tuple(users))
                for name, users in uses.items()
                if len(users) > 1
            ],
        )

    @cached_property
    def loads(self) -> list[float]:
        """Seconds of forward and backward of each partition together."""
        return [f + b for f, b in zip(self.forward_s, self.backward_s)]

    @cached_property
    def sums(self) -> dict[str, list[float]]:
        """By name of a list, its n + 1 prefix sums, from 0; zeros if the list is empty."""
        names = ("forward_s", "backward_s", "reduce_s", "step_s", "memory_bytes")
        nothing = (0.0,) * len(self.forward_s)
        return {name: [0.0, *accumulate(getattr(self, name) or nothing)] for name in names}

    def held_bytes(self, in_flight: int) -> list[int]:
        """Bytes that partitions hold with so many micro-batches between forward and backward."""
        held = zip(self.kept_bytes, self.activation_bytes)
        return [round(kept + in_flight * activation) for kept, activation in held]

    def joint(self) -> "PartitionTable":
        """The table with backwards that cannot be split."""
        return replace(self, weight_part_s=[None] * len(self.forward_s))

    def recomputed(self) -> "PartitionTable":
        """The table with recomputation: the backward includes a forward, and cannot be split."""
        # autograd recomputes a stage as one operation, whose backward has no parts
        return replace(self.joint(), backward_s=self.loads)

    def averaged(self) -> "PartitionTable":
        """The table with memory for the buckets in which replicas average gradients."""
        kept = zip(self.kept_bytes, self.gradient_bytes)
        return replace(self, kept_bytes=[size + copy for size, copy in kept])

    def divided(self, replicas: int) -> "PartitionTable":
        """The table if this number of replicas divides the optimizer state."""
        kept = [
            size - state * (replicas - 1) / replicas
            for size, state in zip(self.kept_bytes, self.state_bytes)
        ]
        # no states are left to divide: a second call must not divide again
        return replace(self, kept_bytes=kept, state_bytes=()) if kept else self

    def scaled(self, share: float) -> "PartitionTable":
        """An estimate of the table for a micro-batch with this fraction of the samples."""
        names = ("forward_s", "backward_s", "cut_bytes", "activation_bytes", "input_part_s")
        return replace(
            self,
            weight_part_s=[None if v is None else share * v for v in self.weight_part_s],
            output_bytes=share * self.output_bytes,
            **{n: [share * v for v in getattr(self, n)] for n in names},
        )

    def rows(self, ends: Sequence[int], costs: StepCosts) -> tuple[StagePlan, ...]:
        """The rows of a plan: contents, times, memory and traffic of each stage.

        Args:
            ends: For each of S stages its end, the number after its last partition.
            costs: Times of the stages.
        """
        total = sum(self.loads) or 1.0
        # the last stage has no next one to send to
        times = {name: [*getattr(costs, name), 0.0] for name in TIMES}
        cut_bytes, rows = [*self.cut_bytes, 0], []
        for stage, (a, b) in enumerate(pairwise((0, *ends))):
            rows.append(
                StagePlan(
                    layers=sum(self.layers[a:b]),
                    partitions=tuple(self.names[a:b]),
                    parameters=sum(self.parameters[a:b]),
                    load=sum(self.loads[a:b]) / total,
                    device=costs.devices[stage],
                    memory_bytes=_total(self.memory_bytes, a, b),
                    cut_bytes=round(cut_bytes[b - 1]),
                    gradient_bytes=_total(self.gradient_bytes, a, b),
                    **{name: values[stage] for name, values in times.items()},
                )
            )
        return tuple(rows)


def _total(sizes: Sequence[float], a: int, b: int) -> int | None:
    """Sum of the sizes of partitions a .. b - 1; None: they are not known."""
    return round(sum(sizes[a:b])) if sizes else None


@dataclass(frozen=True, kw_only=True)
class CalledNetwork:
    """A network with the graph and the tensors of its first call.

    Attributes:
        name: the network's dotted name in the LightningModule.
        graph: graph of the first call.
        partitions: partitions of the graph.
        leaves: input tensors of that call, or of one of its micro-batches.
        known: profile of the partitions; None: it must be measured.
    """

    name: str
    graph: NetworkGraph
    partitions: Sequence[NetworkPartition]
    leaves: Sequence[Tensor]
    known: Profile | None = None

    def profile(self, device: torch.device) -> Profile:
        """Profile the partitions on a device, or read the profile from the cache."""
        if self.known is not None:
            return self.known
        known = self.graph, self.partitions, self.leaves
        measured = partial(measure, *known, device=device)
        return cached(measured, *known, device)

    def remembered(self, device: torch.device) -> "CalledNetwork":
        """The same with its profile, and without the memory of the tensors of its call."""
        leaves = [leaf.detach().to("meta") for leaf in self.leaves]
        return replace(self, leaves=leaves, known=self.profile(device))

    def table(
        self,
        device: torch.device,
        state_bytes: Mapping[str, int],
        *,
        divides_states: bool = False,
    ) -> PartitionTable:
        """The table of the partitions, from their profile on a device.

        Args:
            device: device to measure on.
            state_bytes: bytes of optimizer state, by name of the parameter.
            divides_states: whether replicas divide the optimizer state.
        """
        profile = self.profile(device).with_optimizer(self.partitions, state_bytes)
        return PartitionTable.of(
            self.graph, self.partitions, profile, divides_states=divides_states
        )
