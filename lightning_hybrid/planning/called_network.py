"""A network as the planner gets it: its graph, the inputs of its first call, and its costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightning_hybrid.graph import NetworkGraph, NetworkPartition
from lightning_hybrid.planning.measure import measure
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.profile_cache import cached


@dataclass(frozen=True, kw_only=True)
class CalledNetwork:
    """A network with the graph and the tensors of its first call.

    Attributes:
        name: the network's dotted name in the LightningModule.
        graph: graph of the first call.
        partitions: partitions of the graph.
        leaves: input tensors of that call, or of one of its micro-batches, as `NetworkGraph.bind`
            gives them.
        known: costs of the partitions; None: `profile` measures them.
    """

    name: str
    graph: NetworkGraph
    partitions: Sequence[NetworkPartition]
    leaves: Sequence[Tensor]
    known: PartitionTable | None = None

    def profile(self, device: torch.device) -> PartitionTable:
        """Get the costs of the partitions for a micro-batch of `leaves`, without optimizer state.

        They are `known`, or read from the cache on disk, or measured and written to that cache.

        Args:
            device: device to measure on.
        """
        if self.known is not None:
            return self.known
        known = self.graph, self.partitions, self.leaves
        measured = partial(measure, *known, device=device)
        return cached(measured, *known, device)

    def remembered(self, device: torch.device) -> "CalledNetwork":
        """Make a copy for planning again later: with its profile, and without input values.

        Its `leaves` are on the meta device, where tensors have shapes and no memory.

        Args:
            device: device to measure on, if the profile is not known.
        """
        leaves = [leaf.detach().to("meta") for leaf in self.leaves]
        return replace(self, leaves=leaves, known=self.profile(device))
