"""A network as it was called: its graph and the inputs of its first call, and what it costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.graph import NetworkGraph, NetworkPartition, find_boundary
from lightning_hybrid.planning import NetworkCosts, PartitionTable, PlanSettings
from lightning_hybrid.profiling.measure import measure
from lightning_hybrid.profiling.network_table import count, states_of_partitions
from lightning_hybrid.profiling.optimizer_states import optimizer_bytes
from lightning_hybrid.profiling.profile_cache import cached


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

    def costs(
        self,
        settings: PlanSettings,
        replicas: int,
        device: torch.device,
        optimizers: Sequence[Optimizer] | None = None,
    ) -> NetworkCosts:
        """Get the costs of the network in a run, from which its plan is made.

        If the user has given cut points, nothing is measured: unless the profile is known, FLOPs
        are counted.

        Args:
            settings: options of the user.
            replicas: number of replicas.
            device: device to measure on.
            optimizers: optimizers that train the network; None: it is not trained in this run, so
                that only its parameters need memory.

        Raises:
            NetworkError: a cut point is unknown, or the network must not be cut there.
        """
        cut_points = None
        if isinstance(settings.allocation, tuple):
            # cuts are given, so there is nothing to decide by measured times
            cut_points = self._first_of_stages(settings.allocation)
            table = self.known or count(self.graph, self.partitions)
        else:
            table = self.profile(device)
        sizes = {name: p.nbytes for name, p in self.graph.network.named_parameters()}
        return NetworkCosts(
            table=self._with_memory(table, settings, replicas, optimizers),
            largest_bytes=[
                max((sizes[name] for name in partition.parameters), default=0)
                for partition in self.partitions
            ],
            input_bytes=sum(leaf.nbytes for leaf in self.leaves),
            samples=self.graph.batch_of(self.leaves) or 1,
            trains=optimizers is not None,
            may_go_inside=not self.graph.no_shares,
            cut_points=cut_points,
        )

    def _with_memory(
        self,
        table: PartitionTable,
        settings: PlanSettings,
        replicas: int,
        optimizers: Sequence[Optimizer] | None,
    ) -> PartitionTable:
        """Make a copy of a table with the memory that partitions keep in a run, whatever the cuts.

        Args:
            table: the partitions.
            settings: options of the user.
            replicas: number of replicas.
            optimizers: optimizers that train the network; None: it is not trained, and keeps only
                its parameters.

        Returns:
            The table with `kept_bytes`, or without them if FLOPs were counted and nothing was
            measured.
        """
        if optimizers is None:
            return table.untrained()
        if not table.is_measured:  # memory is not known from counted FLOPs
            return replace(table, kept_bytes=(), activation_bytes=())
        sharers = replicas if settings.shards_states else 1
        states = optimizer_bytes(self.graph.network, optimizers, sharers)
        table = table.with_optimizer(states_of_partitions(self.partitions, states))
        # averaging needs buckets, which take memory of the size of the gradients
        return table.averaged() if replicas > 1 or settings.has_copies else table

    def _first_of_stages(self, cut_points: Sequence[str]) -> list[str]:
        """Find the partitions at which the user's cut points begin stages.

        Args:
            cut_points: dotted names of modules in the LightningModule. Those in other networks are
                left out, unless none is in this one.

        Returns:
            For each cut point that is taken, the name of the partition that begins there.

        Raises:
            NetworkError: a cut point is unknown, or the network must not be cut there.
        """
        prefix = f"{self.name}." if self.name else ""
        # of several networks each takes those with its name; without any, an unknown one raises
        # below
        mine = [point for point in cut_points if point.startswith(prefix)]
        points = [point.removeprefix(prefix) for point in mine or cut_points]
        parts, prefix = self.partitions, prefix if mine else ""
        return [parts[find_boundary(parts, point, prefix)].name for point in points]
