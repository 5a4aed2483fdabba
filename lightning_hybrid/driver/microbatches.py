"""Divides the batch of a call into micro-batches, which the stages take one by one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hybrid.graph import NetworkGraph, fits

NumbersOfMicrobatches = tuple[tuple[int | float, ...], ...]
"""Per micro-batch, the values of the graph's numbers, which follow from the sizes of its inputs."""


class Specialization:
    """One captured graph of a network that has been cut, and how batches are split for it.

    Args:
        number: number of the graph among those of the network, the same on all ranks.
        graph: the graph.
        parts: into how many micro-batches a batch may be split.
    """

    def __init__(self, number: int, graph: NetworkGraph, parts: int) -> None:
        self.number = number
        self.graph = graph
        self._parts = parts
        self._splits: dict[
            tuple[torch.Size, ...], tuple[int, NumbersOfMicrobatches, list[int]]
        ] = {}

    def split(self, leaves: Sequence[Tensor]) -> tuple[list[list[Tensor]], NumbersOfMicrobatches]:
        """Split the inputs of a call into micro-batches.

        It is a single one, of the whole batch, if the graph does not hold for parts of their size.

        Args:
            leaves: the inputs of the graph, for the whole batch.

        Returns:
            Per micro-batch its inputs; and per micro-batch the values of the graph's numbers, which
            follow from the sizes of the inputs.
        """
        parts, numbers, _ = self._known(leaves)
        return self.graph.split(leaves, parts), numbers

    def samples(self, leaves: Sequence[Tensor]) -> list[int]:
        """The number of samples of each micro-batch of a call."""
        return self._known(leaves)[2]

    def _known(self, leaves: Sequence[Tensor]) -> tuple[int, NumbersOfMicrobatches, list[int]]:
        """How a batch is split; cached by the shapes of the inputs.

        Returns:
            The number of micro-batches; per micro-batch the values of the graph's numbers; per
            micro-batch its number of samples.
        """
        shapes = tuple([leaf.shape for leaf in leaves])
        known = self._splits.get(shapes)
        if known is None:
            graph, parts = self.graph, self._parts
            if parts > 1 and not fits(graph, leaves, parts):
                parts = 1  # (the graph does not hold for parts of this size)
            slices = graph.split(leaves, parts)
            numbers = tuple([graph.values_of_numbers(graph.sizes(part)) for part in slices])
            known = parts, numbers, [graph.batch_of(part) or 1 for part in slices]
            self._splits[shapes] = known
        return known
