"""What the partitions of a network take, at one size of the micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.planning.partition_table import PartitionTable


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the n partitions of a network take, at one size of the micro-batch.

    Attributes:
        names: (n,) of each the first module.
        forward_s: (n,) seconds of a forward on a device of speed 1.
        backward_s: (n,) seconds of a backward, likewise.
        cut_bytes: (n - 1,) bytes that cross the cut after a partition.
        parameters: (n,) numbers of elements.
        gradient_bytes: (n,) size of the gradients of what is trained.
        kept_bytes: (n,) parameters, gradients and the state of the optimizer.
        activation_bytes: (n,) held for each micro-batch between its forward and its backward.
        layers: (n,) numbers of layers.
        input_part_s: (n,) seconds of the input part of a split backward; empty: half of it.
        weight_part_s: (n,) likewise of its weight part; None: it cannot be split.
    """

    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    cut_bytes: tuple[float, ...]
    parameters: tuple[int, ...]
    gradient_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    layers: tuple[int, ...]
    input_part_s: tuple[float, ...] = ()
    weight_part_s: tuple[float | None, ...] = ()

    def memory_bytes(self, in_flight: int) -> list[int]:
        """(n,) held with this many micro-batches between their forward and their backward."""
        held = zip(self.kept_bytes, self.activation_bytes)
        return [round(kept + in_flight * activation) for kept, activation in held]

    def table(
        self, in_flight: int, reduce_s: Sequence[float], step_s: Sequence[float]
    ) -> PartitionTable:
        """What the search takes.

        Args:
            in_flight: number of micro-batches between their forward and their backward.
            reduce_s: (n,) seconds of the all-reduce; empty: not counted.
            step_s: (n,) seconds of the optimizer step.
        """
        return PartitionTable(
            names=self.names,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            cut_bytes=self.cut_bytes,
            parameters=self.parameters,
            layers=self.layers,
            reduce_s=reduce_s,
            step_s=step_s,
            memory_bytes=self.memory_bytes(in_flight),
            input_part_s=self.input_part_s,
            weight_part_s=self.weight_part_s,
        )

    def averaged(self) -> "Parts":
        """The same where several replicas average their gradients, in copies of them."""
        kept = zip(self.kept_bytes, self.gradient_bytes)
        return replace(self, kept_bytes=tuple(size + copy for size, copy in kept))

    def scaled(self, share: float) -> "Parts":
        """An estimate for a micro-batch of this share of the samples."""
        names = ("forward_s", "backward_s", "cut_bytes", "activation_bytes")
        scaled = {n: tuple(share * v for v in getattr(self, n)) for n in names}
        return replace(
            self,
            input_part_s=tuple(share * v for v in self.input_part_s),
            weight_part_s=tuple(None if v is None else share * v for v in self.weight_part_s),
            **scaled,
        )
