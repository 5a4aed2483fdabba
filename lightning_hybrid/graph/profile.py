"""What each partition of a network costs: counted in operations, or measured in seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from lightning_hybrid.graph.graph import NetworkGraph
from lightning_hybrid.graph.partition import NetworkPartition


@dataclass(frozen=True)
class PartitionProfile:
    """Cost of one network partition for one micro-batch.

    Attributes:
        name: dotted name of its first module.
        flops: floating-point operations of one forward.
        forward_s: seconds of one forward; None: counted only.
        backward_s: seconds of one backward; None: counted only.
        output_bytes: bytes that cross a cut after it.
        parameter_bytes: size of its parameters.
        gradient_bytes: size of the gradients of those of its parameters that are trained.
        activation_bytes: bytes held from forward to backward; when counted: of all that its layers
            return. A tensor that two partitions hold counts in both, so a sum over partitions is an
            upper bound.
        input_apart_s: seconds of the first part of a split backward, which makes the gradients of
            inputs and keeps what the rest needs; None: counted only, or it cannot be split.
        weight_apart_s: likewise of its second part, which makes the gradients of parameters.
        optimizer_bytes: size of the state that the optimizer keeps; see `Profile.with_optimizer`.
        bucket_bytes: size of the copies of its gradients that replicas average; see
            `Profile.averaged`.
        working_bytes: bytes that its operations allocate while they run, beside their results.
    """

    name: str
    flops: int
    forward_s: float | None
    backward_s: float | None
    output_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    activation_bytes: int
    input_apart_s: float | None
    weight_apart_s: float | None
    optimizer_bytes: int = 0
    bucket_bytes: int = 0
    working_bytes: int = 0

    @property
    def forward(self) -> float:
        """Seconds of one forward, or FLOPs where only those are known."""
        return float(self.flops) if self.forward_s is None else self.forward_s

    @property
    def backward(self) -> float:
        """Seconds of one backward, or where only FLOPs are known those of two forwards."""
        return 2.0 * self.flops if self.backward_s is None else self.backward_s

    @property
    def parts(self) -> tuple[float, float | None]:
        """The input part and the weight part of a split backward, in seconds or FLOPs.

        If it cannot be split, the whole backward and None.
        """
        if self.backward_s is None:
            return float(self.flops), float(self.flops)
        if self.input_apart_s is None or self.weight_apart_s is None:
            return self.backward, None
        return self.input_apart_s, self.weight_apart_s

    def memory_bytes(self, in_flight: int) -> int:
        """Bytes held in training: parameters, gradients, buckets, optimizer state, activations.

        Args:
            in_flight: number of micro-batches that have gone forward and not yet backward.
        """
        gradients = self.gradient_bytes + self.bucket_bytes
        kept = self.parameter_bytes + gradients + self.optimizer_bytes
        return kept + in_flight * self.activation_bytes


@dataclass(frozen=True)
class Profile:
    """Costs of all partitions of a network, in order, at one size of the micro-batch.

    Attributes:
        partitions: one entry for each, in order.
        batch: size of the micro-batch that the numbers are for.
        device: the device that was measured; ``counted`` when none was.
    """

    partitions: tuple[PartitionProfile, ...]
    batch: int
    device: str

    @property
    def is_measured(self) -> bool:
        return self.device != COUNTED

    def with_optimizer(
        self, partitions: Sequence[NetworkPartition], state_bytes: Mapping[str, int]
    ) -> Self:
        """A copy with `optimizer_bytes`, from the bytes of optimizer state per parameter name."""
        sums = [sum(state_bytes.get(name, 0) for name in p.parameters) for p in partitions]
        rows = zip(self.partitions, sums)
        return dataclasses.replace(
            self,
            partitions=tuple(dataclasses.replace(row, optimizer_bytes=size) for row, size in rows),
        )

    def averaged(self) -> Self:
        """A copy with `bucket_bytes`, for several replicas, which average copies of gradients."""
        rows = self.partitions
        copies = (dataclasses.replace(row, bucket_bytes=row.gradient_bytes) for row in rows)
        return dataclasses.replace(self, partitions=tuple(copies))

    def record(self) -> dict[str, Any]:
        """The profile in plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """A profile from `record`.

        Raises:
            TypeError, KeyError: it is no record of a profile.
        """
        rows = tuple(PartitionProfile(**row) for row in record["partitions"])
        return cls(**{**record, "partitions": rows})


COUNTED = "counted"
_NOT_MEASURED: dict[str, Any] = dict.fromkeys(
    ("forward_s", "backward_s", "input_apart_s", "weight_apart_s")
)


def count(graph: NetworkGraph, partitions: Sequence[NetworkPartition]) -> Profile:
    """Count operations and bytes at the captured batch size; nothing runs."""
    profiles = [
        PartitionProfile(
            name=partition.name,
            flops=partition.flops,
            **_NOT_MEASURED,
            output_bytes=partition.output_bytes,
            **parameter_bytes(graph.network, partition.parameters),
            activation_bytes=_returned_bytes(graph, partition),
        )
        for partition in partitions
    ]
    return Profile(tuple(profiles), graph.batch or 1, COUNTED)


def parameter_bytes(network: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """`parameter_bytes` and `gradient_bytes` of `PartitionProfile`, for the parameters named."""
    found = [network.get_parameter(name) for name in names]
    return {
        "parameter_bytes": sum(p.nbytes for p in found),
        "gradient_bytes": sum(p.nbytes for p in found if p.requires_grad),
    }


def _returned_bytes(graph: NetworkGraph, partition: NetworkPartition) -> int:
    largest: dict[int, int] = {}
    for layer in graph.layers[partition.start : partition.stop]:
        for node in (layer.node, *layer.parts):
            if node in graph.info:
                # views and in-place results share memory with what they are made of
                memory = graph.memory.get(node, -1)
                largest[memory] = max(largest.get(memory, 0), graph.info[node].bytes)
    return sum(largest.values())
