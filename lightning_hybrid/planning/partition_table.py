"""What is known of the network partitions of a chain, as the planner takes it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.split_backwards import Halves
from lightning_hybrid.planning.stage_plan import StagePlan
from lightning_hybrid.planning.stage_rows import stage_rows
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
        gradient_bytes: sizes of its gradients, for the report; None: not known.
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
    gradient_bytes: Sequence[int] | None = None
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

    def halves(self) -> Halves:
        """The parts of the backwards."""
        half_s = [backward_s / 2 for backward_s in self.backward_s]
        return Halves(input_s=self.input_part_s or half_s, weight_s=self.weight_part_s or half_s)

    def recomputed(self) -> "PartitionTable":
        """The same where the forward runs again for the backward, which is then one."""
        both_s = [f + b for f, b in zip(self.forward_s, self.backward_s)]
        return replace(self, backward_s=both_s, weight_part_s=[None] * len(both_s))

    def rows(self, ends: Sequence[int], costs: StepCosts) -> tuple[StagePlan, ...]:
        """What the stages of a placement hold, take and send."""
        return stage_rows(
            ends,
            costs,
            names=self.names,
            layers=self.layers,
            parameters=self.parameters,
            loads=[f + b for f, b in zip(self.forward_s, self.backward_s)],
            cut_bytes=self.cut_bytes,
            memory_bytes=self.memory_bytes,
            gradient_bytes=self.gradient_bytes,
        )


_MAY_BE_EMPTY = {"reduce_s", "step_s", "input_part_s", "weight_part_s"}
