"""What a step takes beside computing: messages, the all-reduce, the optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured of it on all ranks, before there is a plan.

    Attributes:
        message_s: seconds that a message between two stages adds, with the work around it.
        reduce_bytes_per_s: of an all-reduce over all ranks, by the size of the tensor.
        reduce_s: seconds of an all-reduce of nothing.
        ranks: how many took part in it.
        update_s_per_byte: seconds of the optimizer step per byte of the parameters that are
            trained.
        overlaps: whether an all-reduce runs beside the backward at no cost, as on an accelerator;
            on a CPU it takes the processor from it.
    """

    message_s: float
    reduce_bytes_per_s: float
    reduce_s: float
    ranks: int
    update_s_per_byte: float
    overlaps: bool

    def reduced_s(self, size: float, replicas: int) -> float:
        """Seconds of the all-reduce of `size` bytes over some replicas, as a ring of them does."""
        if replicas == 1:
            return 0.0
        share = (replicas - 1) / replicas * self.ranks / (self.ranks - 1)
        return self.reduce_s + share * size / self.reduce_bytes_per_s

    def after_backward(
        self, gradient_bytes: Sequence[float], replicas: int
    ) -> tuple[list[float], list[float]]:
        """What follows the last backward of each of n partitions.

        Args:
            gradient_bytes: (n,) size of its gradients.
            replicas: number of replicas.

        Returns:
            (n,) seconds of the all-reduce, which are empty where it does not overlap, and (n,) of
            the optimizer step, to which they are then added.
        """
        # an all-reduce of nothing takes its time too: once, with the last partition
        start_s = self.reduced_s(0.0, replicas)
        reduced = [self.reduced_s(size, replicas) - start_s for size in gradient_bytes]
        reduced[-1] += start_s
        updates = [self.update_s_per_byte * size for size in gradient_bytes]
        if self.overlaps:
            return reduced, updates
        return [], [update + reduce for update, reduce in zip(updates, reduced)]
