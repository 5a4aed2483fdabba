"""Gives all ranks the trained weights after a run: each writes what it owns, the others map it.

Where a rank cannot read the file of another one, as on another host, this reports so, and its
caller sends the weights.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import as_they_are, version
from lightning_hybrid.comm.protocol import GiveReport, MapTensors
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.weights import FilesOfWorkers, Weights
from lightning_hybrid.planning import free_on, gigabytes, optimizer_bytes
from lightning_hybrid.remote import is_of_one_rank, is_unread, materialize, refuse_lost
from lightning_hybrid.state import TensorFile, Ticket, put_mapped

_CHANGED_IF_HERE = -1
"""A value that no version counter has, for a tensor that is left in its file.

If it has memory later, it was written to, and so counts as changed.
"""


class AfterRun:
    """Exchanges the tensors of a driver and its workers after a run, through files.

    Args:
        module: the LightningModule, with the parts that it had at the start.
        commands: sends commands to the workers.
        weights: knows which tensors workers own.
        files: has the workers write their tensors to files.
    """

    def __init__(
        self, module: nn.Module, commands: Commands, weights: Weights, files: FilesOfWorkers
    ) -> None:
        self._module = module
        self._weights = weights
        self._commands = commands
        self._files = files
        self._tickets: dict[int, Ticket] | None = None
        self._versions: dict[str, int] = {}

    def map_tensors(self) -> bool:
        """Map the weights, buffers and gradients of the workers into the module on this rank.

        Returns:
            Whether this rank can read the files; else nothing has changed.
        """
        remote = self._commands.remote
        remote.adopt_replaced(computes=False)
        elsewhere = self._weights.owned_elsewhere()
        found = self._files.tensors(at_end=True) if elsewhere else ({}, [])
        if found is None:
            return False
        self._tickets, files = found
        for file in files:
            weights = {name: v for name, v in file["weights"].items() if name in elsewhere}
            put_mapped(self._module, weights)
        remote.adopt_fetched()
        remote.leave_gradients({n: g for file in files for n, g in file["gradients"].items()})
        with as_they_are():
            self._versions = {
                name: _CHANGED_IF_HERE if is_unread(tensor) else version(tensor)
                for name, tensor in elsewhere.items()
            }
        return True

    def lacking(self, device: torch.device, optimizers: Iterable[Optimizer]) -> str:
        """Why a rank has no room for the tensors of all ranks in its memory; empty: all have.

        Args:
            device: the device of this rank, which would get weights, gradients and states.
            optimizers: the user's optimizers.
        """
        owned = self._weights.owned_elsewhere().values()
        with as_they_are():  # (without tensors of configure_model, which stay with their owners)
            weights = sum(tensor.nbytes for tensor in owned if not is_of_one_rank(tensor))
            here = sum(tensor.nbytes for tensor in self._weights.everyones().values()) - weights
        states = sum(optimizer_bytes(self._module, optimizers).values())
        # this rank gets the weights of the others, their gradients, and the states of both
        needed = weights * 2 + round(states * weights / max(1, weights + here))
        left = [free_on(device), *(a.value for a in self._commands.ask(GiveReport("free")))]
        wanted = [needed, *(weights + here for _ in left[1:])]
        for rank, (free, size) in enumerate(zip(left, wanted)):
            if free is not None and free < size:
                return (
                    f"Each rank keeps the {gigabytes(weights + here)} of weights that it has "
                    "trained for itself: it cannot read the files of the others (they are on "
                    "another host, or there is no room for files), and all that a script may read "
                    f"would take {gigabytes(size)} more on rank {rank} of a replica, which has "
                    f"{gigabytes(free)}. Checkpoints of the run have all of it; a parameter of "
                    "another rank cannot be read after it."
                )
        return ""

    def hand_out(self) -> bool:
        """Have the workers map the weights and buffers of all other ranks into their modules.

        Returns:
            Whether all of them could.
        """
        if self._tickets is None:
            return False
        everyones = self._weights.everyones()
        # (tensors that were not written to since they were mapped are in the workers' files)
        mine = {
            n: t
            for n, t in everyones.items()
            if not is_unread(t) and version(t) != self._versions.get(n)
        }
        file = TensorFile(self._files.folder)
        try:
            tickets = {**self._tickets, 0: file.write({"weights": mine})}
            answers = self._commands.ask(MapTensors(tickets))
        except OSError:
            return False
        finally:
            file.close()
        return all(answer.value for answer in answers)


def bring_here(module: nn.Module) -> None:
    """Read the tensors of a module that an earlier run has left in files, before another run.

    Raises:
        NoAddresses: the address space has no room for them.
        DeferredError: an earlier run has failed, and one was lost with another rank.
    """
    tensors = (*module.parameters(), *module.buffers())
    refuse_lost(tensors)
    materialize(filter(is_unread, tensors))
