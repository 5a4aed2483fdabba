"""Who has the weights of the LightningModule while it is built, restored and saved.

A network that is made in ``__init__`` is whole on every rank before a run. One that is made in
``configure_model`` is whole on none: each rank notes down how weights are made, and makes those of
its own stages; see :mod:`lightning_hybrid.network.deferred`. Its checkpoint is read by rank 0, and
the other ranks get an outline of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_hybrid.network.deferred import Deferral
from lightning_hybrid.runtime.large import Unfilled, outline
from lightning_hybrid.world import NoWorld, Phase, World

Checkpoint = dict[str, Any]


class WholeModule:
    """Every rank has all weights, or is to make them as on one device."""

    deferred = False
    """Whether each rank makes the weights of its own stages only."""
    outlined = False
    """Whether the checkpoint that this rank has read last is an outline."""

    def building(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, weights are made and changed as ever."""
        return nullcontext()

    def loading(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, weights of a checkpoint are written as ever."""
        return nullcontext()

    def read_checkpoint(self, read: Callable[[], Checkpoint], ranks: World | NoWorld) -> Checkpoint:
        """What ``read`` gives: every rank reads for itself."""
        return read()

    def optimizer_states(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """The checkpoint, from which every rank loads its optimizers."""
        return checkpoint


class DeferredModule:
    """Weights are made by the ranks that own them.

    Args:
        device: where one device would make them.

    Attributes:
        outlined: whether the checkpoint that this rank has read last is an outline.
    """

    deferred = True

    def __init__(self, device: torch.device) -> None:
        self._deferral = Deferral(device)
        self.outlined = False

    def building(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, what is done to weights that are not made yet is noted down."""
        return self._deferral.building(module)

    @contextmanager
    def loading(self, module: nn.Module) -> Iterator[None]:
        """Inside, weights of a checkpoint are kept for their owners; an outline has none."""
        if not self.outlined:
            with self._deferral.building(module, loading=True):
                yield
            return
        with self._deferral.building(module), Unfilled():  # type: ignore[no-untyped-call]
            yield

    def read_checkpoint(self, read: Callable[[], Checkpoint], ranks: World | NoWorld) -> Checkpoint:
        """Before a run rank 0 alone reads, and the others get an outline; all ranks call it.

        Args:
            read: reads all of it.
            ranks: all ranks.
        """
        self.outlined = False
        if not isinstance(ranks, World) or ranks.phase is not Phase.TOGETHER:
            return read()
        if ranks.place.rank == 0:
            checkpoint = read()
            ranks.broadcast(outline(checkpoint))
            return checkpoint
        self.outlined = True
        return ranks.broadcast({})

    def optimizer_states(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """The checkpoint, without the states that an outline has no numbers of."""
        if not self.outlined:
            return checkpoint
        states = [{**state, "state": {}} for state in checkpoint["optimizer_states"]]
        return {**checkpoint, "optimizer_states": states}
