"""The table of a captured network: from measurements, or from counted FLOPs and bytes.

FLOPs are counted in ``graph/operation_effects.py``, and become loads in ``graph/partition.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hybrid.graph import NetworkGraph, NetworkPartition
from lightning_hybrid.planning import COUNTED, PartitionTable, TiedWeight


def table_of(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    rows: Sequence[Mapping[str, Any]],
    batch: int,
    device: str,
) -> PartitionTable:
    """Make the table of a network from measurements, without optimizer state.

    Args:
        graph: graph of the network.
        partitions: partitions of the graph, in order.
        rows: for each partition its times, and its sizes that depend on the micro-batch, by
            name of the attribute; and ``output_bytes``, the bytes that cross a cut after the
            partition.
        batch: number of samples of the micro-batch.
        device: name of the device that was measured, or `COUNTED`.
    """
    weights = dict(graph.network.named_parameters())
    uses = _uses(partitions)
    owned = [
        [weights[name] for name in partition.parameters if uses[name][0] == number]
        for number, partition in enumerate(partitions)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    # the outputs of the last partition cross no cut
    *crossing, outputs = columns.pop("output_bytes")
    parameters = [sum(p.nbytes for p in own) for own in owned]
    gradients = [sum(p.nbytes for p in own if p.requires_grad) for own in owned]
    return PartitionTable(
        names=[partition.name for partition in partitions],
        cut_bytes=crossing,
        output_bytes=outputs,
        parameters=[sum(p.numel() for p in own) for own in owned],
        layers=[len(partition.layers) for partition in partitions],
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        kept_bytes=[p + g for p, g in zip(parameters, gradients)],
        tied=[
            TiedWeight(
                size_bytes=weights[name].nbytes,
                partitions=tuple(users),
                elements=weights[name].numel(),
                copy_bytes=weights[name].nbytes * (1 + weights[name].requires_grad),
            )
            for name, users in uses.items()
            if len(users) > 1
        ],
        batch=batch,
        device=device,
        **columns,
    )


def count(graph: NetworkGraph, partitions: Sequence[NetworkPartition]) -> PartitionTable:
    """Make the table of a network from counted FLOPs and bytes, at the captured batch size.

    Nothing runs. A backward counts as two forwards: one for each part of a split backward.

    Args:
        graph: graph of the network.
        partitions: partitions of the graph, in order.
    """
    rows = [
        {
            "forward_s": float(partition.flops),
            "backward_s": 2.0 * partition.flops,
            "input_part_s": float(partition.flops),
            "weight_part_s": float(partition.flops),
            "output_bytes": partition.output_bytes,
            "activation_bytes": _returned_bytes(graph, partition),
            "working_bytes": 0,
        }
        for partition in partitions
    ]
    return table_of(graph, partitions, rows, graph.batch or 1, COUNTED)


def _returned_bytes(graph: NetworkGraph, partition: NetworkPartition) -> int:
    largest: dict[int, int] = {}
    for layer in graph.layers[partition.start : partition.stop]:
        for node in (layer.node, *layer.parts):
            if node in graph.info:
                # views and in-place results share memory with what they are made of
                memory = graph.memory.get(node, -1)
                largest[memory] = max(largest.get(memory, 0), graph.info[node].bytes)
    return sum(largest.values())


def states_of_partitions(
    partitions: Sequence[NetworkPartition], state_bytes: Mapping[str, int]
) -> list[int]:
    """Add up the optimizer state of the weights that each partition owns.

    Args:
        partitions: partitions of the network, in order.
        state_bytes: bytes of optimizer state, by name of the parameter.

    Returns:
        For each partition the bytes, as `PartitionTable.with_optimizer` takes them.
    """
    states = [0] * len(partitions)
    for name, (first, *_) in _uses(partitions).items():
        states[first] += state_bytes.get(name, 0)
    return states


def _uses(partitions: Sequence[NetworkPartition]) -> dict[str, list[int]]:
    """By name of the parameter, the numbers of the partitions that use it, rising."""
    uses: dict[str, list[int]] = {}
    for number, partition in enumerate(partitions):
        for name in partition.parameters:
            uses.setdefault(name, []).append(number)
    return uses
