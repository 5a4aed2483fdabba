"""What is known of the network partitions of a chain: the one record that plans are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_hybrid.errors import PlanError
from lightning_hybrid.network import NetworkGraph, NetworkPartition, Profile
from lightning_hybrid.planning.split_backwards import Halves
from lightning_hybrid.planning.stage_plan import StagePlan
from lightning_hybrid.planning.step_time import StepCosts


@dataclass(frozen=True, kw_only=True)
class PartitionTable:
    """Times and sizes of n network partitions, in order, at the size of a micro-batch.

    Times are those of a device of capacity 1, in seconds; sizes are in bytes.

    Attributes:
        names: of each partition its first module.
        forward_s: times of the forward of a micro-batch.
        backward_s: times of its backward.
        cut_bytes: n - 1 sizes of what crosses the cut after a partition per micro-batch.
        parameters: numbers of parameter elements.
        layers: numbers of layers.
        reduce_s: times of the all-reduce of gradients over the replicas; empty: not counted.
        step_s: times of the optimizer step; empty: not counted.
        memory_bytes: what a partition holds while it trains; None: not known.
        gradient_bytes: sizes of its gradients; empty: not known.
        kept_bytes: parameters, gradients and the state of the optimizer; empty: not known.
        state_bytes: of that the state which replicas divide; empty: each has all of it.
        activation_bytes: held for each micro-batch between its forward and its backward; likewise.
        input_part_s: times of the input part of a backward that is split, for `zero_bubble`;
            empty: half of the backward.
        weight_part_s: times of its weight part, None where it cannot be split; empty: half of the
            backward.

    Raises:
        PlanError: lists of unequal length.
    """

    names: Sequence[str]
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    cut_bytes: Sequence[float]
    parameters: Sequence[int]
    layers: Sequence[int]
    reduce_s: Sequence[float] = ()
    step_s: Sequence[float] = ()
    memory_bytes: Sequence[int] | None = None
    gradient_bytes: Sequence[float] = ()
    kept_bytes: Sequence[float] = ()
    state_bytes: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    input_part_s: Sequence[float] = ()
    weight_part_s: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        n = len(self.names)
        for name, value in vars(self).items():
            needed = n - 1 if name == "cut_bytes" else n
            is_given = value is not None and (len(value) or name not in _MAY_BE_EMPTY)
            if is_given and len(value) != needed:
                raise PlanError(
                    f"{name} has {len(value)} entries, {needed} are needed for {n} partitions"
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
        """What a profile says.

        Args:
            graph: of the network.
            partitions: of the graph.
            profile: of the partitions.
            share: size of the micro-batch, as a share of the profile's.
            seconds: that a unit of the profile's times is; a FLOP where they were counted.
            divides_states: whether replicas divide the state of the optimizer.
        """
        sizes = {name: p.numel() for name, p in graph.network.named_parameters()}
        rows, unit_s = profile.partitions, share * seconds
        weights = [row.parts[1] for row in rows]
        return cls(
            names=[partition.name for partition in partitions],
            forward_s=[unit_s * row.forward for row in rows],
            backward_s=[unit_s * row.backward for row in rows],
            cut_bytes=[round(share * row.output_bytes) for row in rows[:-1]],
            parameters=[sum(sizes[n] for n in partition.parameters) for partition in partitions],
            layers=[len(partition.layers) for partition in partitions],
            gradient_bytes=[row.gradient_bytes for row in rows],
            kept_bytes=[row.memory_bytes(0) for row in rows],
            state_bytes=[row.optimizer_bytes for row in rows] if divides_states else (),
            activation_bytes=[round(share * row.activation_bytes) for row in rows],
            input_part_s=[unit_s * row.parts[0] for row in rows],
            weight_part_s=[None if weight is None else unit_s * weight for weight in weights],
        )

    def held_bytes(self, in_flight: int) -> list[int]:
        """What partitions hold with this many micro-batches between forward and backward."""
        held = zip(self.kept_bytes, self.activation_bytes)
        return [round(kept + in_flight * activation) for kept, activation in held]

    def halves(self) -> Halves:
        """The parts of the backwards."""
        half_s = [backward_s / 2 for backward_s in self.backward_s]
        return Halves(input_s=self.input_part_s or half_s, weight_s=self.weight_part_s or half_s)

    def joint(self) -> "PartitionTable":
        """The same where no backward can be split."""
        return replace(self, weight_part_s=[None] * len(self.names))

    def recomputed(self) -> "PartitionTable":
        """The same where the forward runs again for the backward, which is then one."""
        both_s = [f + b for f, b in zip(self.forward_s, self.backward_s)]
        return replace(self.joint(), backward_s=both_s)

    def averaged(self) -> "PartitionTable":
        """The same where several replicas average their gradients, in copies of them."""
        kept = zip(self.kept_bytes, self.gradient_bytes)
        return replace(self, kept_bytes=[size + copy for size, copy in kept])

    def divided(self, replicas: int) -> "PartitionTable":
        """The same where so many replicas divide the states that they may divide."""
        kept = [
            size - state * (replicas - 1) / replicas
            for size, state in zip(self.kept_bytes, self.state_bytes)
        ]
        return replace(self, kept_bytes=kept, state_bytes=()) if kept else self

    def scaled(self, share: float) -> "PartitionTable":
        """An estimate for a micro-batch of this share of the samples."""
        names = ("forward_s", "backward_s", "cut_bytes", "activation_bytes", "input_part_s")
        return replace(
            self,
            weight_part_s=[None if v is None else share * v for v in self.weight_part_s],
            **{n: [share * v for v in getattr(self, n)] for n in names},
        )

    def rows(self, ends: Sequence[int], costs: StepCosts) -> tuple[StagePlan, ...]:
        """What the stages of a placement hold, take and send.

        Args:
            ends: For each of S stages the number after its last partition.
            costs: What the stages take.
        """
        loads = [f + b for f, b in zip(self.forward_s, self.backward_s)]
        total = sum(loads) or 1.0
        cut_bytes = [*self.cut_bytes, 0]
        memory, gradients, rows = self.memory_bytes, self.gradient_bytes, []
        for stage, (a, b) in enumerate(pairwise((0, *ends))):
            is_last = stage == len(ends) - 1
            rows.append(
                StagePlan(
                    layers=sum(self.layers[a:b]),
                    partitions=tuple(self.names[a:b]),
                    parameters=sum(self.parameters[a:b]),
                    load=sum(loads[a:b]) / total,
                    device=costs.devices[stage],
                    memory_bytes=None if memory is None else sum(memory[a:b]),
                    forward_s=costs.forward_s[stage],
                    backward_s=costs.backward_s[stage],
                    weight_s=_at(costs.weight_s, stage),
                    send_s=0.0 if is_last else _at(costs.send_s, stage),
                    latency_s=0.0 if is_last else _at(costs.latency_s, stage),
                    reduce_s=_at(costs.reduce_s, stage),
                    step_s=_at(costs.step_s, stage),
                    cut_bytes=round(cut_bytes[b - 1]),
                    gradient_bytes=round(sum(gradients[a:b])) if gradients else None,
                )
            )
        return tuple(rows)


def _at(values: Sequence[float], index: int) -> float:
    return values[index] if len(values) else 0.0


_MAY_BE_EMPTY = {
    *("reduce_s", "step_s", "gradient_bytes", "kept_bytes", "activation_bytes", "state_bytes"),
    *("input_part_s", "weight_part_s"),
}
