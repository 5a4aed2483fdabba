"""What each network partition costs: counted in operations, or measured in seconds."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_hybrid.network.cuts import Cuts
from lightning_hybrid.network.effects import untouched
from lightning_hybrid.network.graph import NetworkGraph
from lightning_hybrid.network.partition import NetworkPartition
from lightning_hybrid.network.stage import Stage, cut


@dataclass(frozen=True)
class PartitionProfile:
    """Cost of one network partition for one micro-batch."""

    name: str
    flops: int
    """floating-point operations of one forward"""
    forward_s: float | None
    """seconds of one forward; None: counted only"""
    backward_s: float | None
    """seconds of one backward, for inputs and parameters; None: counted only"""
    output_bytes: int
    """bytes that cross a cut after it"""
    parameter_bytes: int
    activation_bytes: int
    """bytes held from forward to backward; when counted: of all that its layers return"""


@dataclass(frozen=True)
class Profile:
    """Costs of all partitions of a network, in order."""

    partitions: tuple[PartitionProfile, ...]
    batch: int
    """size of the micro-batch that the numbers are for"""
    device: str
    """what was measured; ``counted`` when nothing was"""

    @property
    def loads(self) -> tuple[float, ...]:
        """Load per partition: seconds forward and backward, or the same in FLOPs when counted.

        A backward is counted as two forwards: one for the inputs, one for the parameters.
        """
        return tuple(
            3.0 * p.flops
            if p.forward_s is None or p.backward_s is None
            else p.forward_s + p.backward_s
            for p in self.partitions
        )

    def to_json(self) -> str:
        """The profile as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A profile from `to_json`."""
        fields = json.loads(text)
        fields["partitions"] = tuple(PartitionProfile(**p) for p in fields["partitions"])
        return cls(**fields)


def count(graph: NetworkGraph, partitions: Sequence[NetworkPartition]) -> Profile:
    """Count operations and bytes at the traced batch size; nothing runs."""
    profiles = [
        PartitionProfile(
            partition.name,
            partition.flops,
            None,
            None,
            partition.output_bytes,
            _parameter_bytes(graph.network, partition.parameters),
            _returned_bytes(graph, partition),
        )
        for partition in partitions
    ]
    return Profile(tuple(profiles), graph.batch or 1, "counted")


def measure(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    *,
    repeats: int = 3,
    device: torch.device | None = None,
) -> Profile:
    """Run each partition, forward and backward, on a real micro-batch.

    The mode of the network (training, evaluation) is kept. Buffers, generators and gradients are
    afterwards what they were.

    Args:
        graph: the traced network.
        partitions: its partitions.
        leaves: the tensors of `NetworkGraph.bind` for one micro-batch.
        repeats: measurements after one that warms up; their median counts.
        device: where to measure; by default where the network is. Partitions go there one by one.
    """
    batch = graph.batch_of(leaves) or 1
    scale = batch / (graph.batch or batch)
    cuts = Cuts(graph)
    stages = cut(graph, partitions, range(1, len(partitions)))
    profiles = []
    with torch.inference_mode(False), untouched(graph.network), torch.enable_grad():
        # Lightning validates in inference mode, whose tensors no backward may keep
        values = [leaf.clone() if leaf.is_inference() else leaf for leaf in leaves]
        home = next((p.device for p in graph.network.parameters()), device)
        values = [value.to(device or value.device) for value in values]
        for partition, stage in zip(partitions, stages):
            if device is not None:
                stage.move(device)
            own = [p for p in stage.parameters() if p.requires_grad]
            forward_s, backward_s, saved = _timed(stage, values, own, repeats)
            with torch.no_grad():
                values = stage(values)
            profiles.append(
                PartitionProfile(
                    partition.name,
                    round(partition.flops * scale),
                    forward_s,
                    backward_s,
                    sum(v.nbytes for v in values)
                    if partition.stop < len(graph.layers)
                    else round(cuts.bytes(partition.stop) * scale),
                    _parameter_bytes(graph.network, partition.parameters),
                    saved,
                )
            )
            if device is not None and home is not None:
                stage.move(home)
    return Profile(tuple(profiles), batch, _device_name(values))


def _timed(
    stage: Stage, values: Sequence[Tensor], parameters: Sequence[Tensor], repeats: int
) -> tuple[float, float, int]:
    """Median seconds forward and backward, and bytes held between them."""
    rounds = [_round(stage, values, parameters) for _ in range(1 + repeats)]
    forwards, backwards, saved = zip(*rounds[1:])
    return statistics.median(forwards), statistics.median(backwards), max(saved)


def _round(
    stage: Stage, values: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[float, float, int]:
    inputs = [v.detach() for v in values]
    is_first = stage.layers[0] == 0
    wanted = [v.requires_grad_() for v in inputs if v.is_floating_point() and not is_first]
    saved = _Saved([*stage.parameters(), *stage.buffers()])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept):
        outputs, forward_s = _clocked(lambda: stage(inputs), values)
    # a tensor that only passes through has no work to do
    results = [o for o in outputs if o.requires_grad and o.grad_fn is not None]
    if not results:
        return forward_s, 0.0, saved.bytes
    ones, needed = [torch.ones_like(o) for o in results], [*wanted, *parameters]
    _, backward_s = _clocked(
        lambda: torch.autograd.grad(results, needed, ones, allow_unused=True), values
    )
    return forward_s, backward_s, saved.bytes


class _Saved:
    """Adds up the memory of the tensors that autograd keeps, parameters left out."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        self._seen = {t.untyped_storage().data_ptr() for t in known}
        self._kept: list[Any] = []  # an address is only a name while its owner lives
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def _clocked(call: Callable[[], Any], values: Sequence[Tensor]) -> tuple[Any, float]:
    _wait(values)
    start = time.perf_counter()
    result = call()
    _wait(values)
    return result, time.perf_counter() - start


def _wait(values: Sequence[Tensor]) -> None:
    for kind in {v.device for v in values if v.device.type != "cpu"}:
        torch.accelerator.synchronize(kind)


def _device_name(values: Sequence[Tensor]) -> str:
    device = values[0].device if values else torch.device("cpu")
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _parameter_bytes(network: nn.Module, names: Sequence[str]) -> int:
    return sum(network.get_parameter(name).nbytes for name in names)


def _returned_bytes(graph: NetworkGraph, partition: NetworkPartition) -> int:
    largest: dict[int, int] = {}
    for layer in graph.layers[partition.start : partition.stop]:
        for value in layer.values:
            # views and in-place results share memory with what they are made of
            storage = value.storages[0]
            largest[storage] = max(largest.get(storage, 0), value.bytes)
    return sum(largest.values())
