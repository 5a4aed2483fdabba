"""Writes a worker's part of a sharded checkpoint."""

from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor, nn

from lightning_hybrid.comm import Answer
from lightning_hybrid.comm.protocol import (
    AwaitShards,
    GiveTensor,
    OutlineStates,
    SaveShard,
)
from lightning_hybrid.stage import tensors_of
from lightning_hybrid.state import (
    LAST_S,
    Background,
    Key,
    Shard,
    TensorAddress,
    leave_shard,
    outlined,
    staged,
    write_shard,
)
from lightning_hybrid.worker.worker_optimizers import WorkerOptimizers


class WorkerShards:
    """Writes what a worker owns to a sharded checkpoint, at once or in the background.

    Args:
        module: the module of this rank, with the names of the LightningModule.
        optimizers: the copies of the user's optimizers on this rank.
        rank: number of this rank in the mesh, replica by replica.
    """

    def __init__(self, module: nn.Module, optimizers: WorkerOptimizers, rank: int) -> None:
        self._module = module
        self._optimizers = optimizers
        self._rank = rank
        self._background = Background()

    def close(self) -> None:
        """Wait for at most `LAST_S` seconds until what is being written is on the disk."""
        with suppress(Exception):  # the first error is what counts
            self._background.wait(LAST_S)

    def _await_shards(self, _: AwaitShards) -> None:
        self._background.wait()

    def _outline_states(self, command: OutlineStates) -> Answer:
        states = self._optimizers.states(command.optimizer).items()
        return Answer(value={name: outlined(state) for name, state in states})

    def _find(self, part: Mapping[Key, TensorAddress]) -> dict[Key, Tensor]:
        weights = dict[str, Tensor]()
        if any(owned.optimizer is None for owned in part.values()):
            weights = tensors_of(self._module)
        return {
            key: weights[owned.name] if owned.optimizer is None else self._optimizers.find(owned)
            for key, owned in part.items()
        }

    def _give_tensor(self, command: GiveTensor) -> Answer:
        [found] = self._find({(): command.owned}).values()
        return Answer(tensors=[("", found)])

    def _save_shard(self, command: SaveShard) -> Answer:
        """Write the tensors that a command names to this rank's file of a sharded checkpoint.

        If ``command.staged``, copies are made now and written in the background; a file in the
        folder then tells the driver what was written.

        Returns:
            An answer; if not staged, with the record of what was written, or an OSError.
        """
        tensors = self._find(command.part)
        if not command.staged:
            return Answer(value=self._write(command.folder, tensors))
        self._background.wait()  # (so that copies of one checkpoint exist at a time)
        copies = staged(tensors)
        self._background.submit(
            lambda: leave_shard(command.folder, self._rank, self._write(command.folder, copies))
        )
        return Answer()

    def _write(self, folder: str, tensors: dict[Key, Tensor]) -> Shard | OSError:
        try:
            return write_shard(folder, self._rank, tensors)
        except OSError as error:  # (an answer, not a failure of the worker: the run may go on)
            return error
