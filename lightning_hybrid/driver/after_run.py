"""What ranks find of each other after a run: each keeps what it owns, the others map its file.

(Where a rank cannot read the file of another one, since it is on another host, weights travel.)
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import as_they_are, version
from lightning_hybrid.comm.protocol import MapTensors, Report
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.weights import FilesOfWorkers, Weights
from lightning_hybrid.planning import free_on, gigabytes, optimizer_bytes
from lightning_hybrid.remote import is_of_one_rank, is_unread, materialize
from lightning_hybrid.state import TensorFile, Ticket, put_mapped

_CHANGED_IF_HERE = -1
"""No version: a tensor that had no memory has some now, since it was written to."""


class AfterRun:
    """What the driver of a replica and its workers find of each other after a run.

    Args:
        module: the LightningModule.
        commands: to the workers.
        weights: of all stages.
        files: of the workers.
    """

    def __init__(
        self, module: nn.Module, commands: Commands, weights: Weights, files: FilesOfWorkers
    ) -> None:
        self._module, self._weights = module, weights
        self._commands, self._files = commands, files
        self._tickets: dict[int, Ticket] | None = None
        self._versions: dict[str, int] = {}

    def map_tensors(self) -> bool:
        """Have here the weights, buffers and gradients that the workers own.

        Returns:
            Whether that could be done; else nothing has happened.
        """
        remote = self._commands.remote
        remote.adopt_replaced()
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
        """Where files cannot be read: why the ranks have no room for all, if they have not.

        Args:
            device: of this rank, which gets weights, gradients and states.
            optimizers: the user's.
        """
        owned = self._weights.owned_elsewhere().values()
        with as_they_are():  # (what is made in configure_model stays where it is in any case)
            weights = sum(tensor.nbytes for tensor in owned if not is_of_one_rank(tensor))
            here = sum(tensor.nbytes for tensor in self._weights.everyones().values()) - weights
        states = sum(optimizer_bytes(self._module, optimizers).values())
        # this rank gets the weights of the others, their gradients, and the states of both
        needed = weights * 2 + round(states * weights / max(1, weights + here))
        left = [free_on(device), *(a.value for a in self._commands.ask(Report("free")))]
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
        """Have on the workers the weights and buffers of all other ranks.

        Returns:
            Whether that could be done.
        """
        if self._tickets is None:
            return False
        everyones = self._weights.everyones()
        # what nobody has written to since it was mapped is in the workers' files already
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
    """Before another run: have memory for what earlier ones have left in files.

    Raises:
        NoAddresses: there is no room for it.
    """
    materialize(filter(is_unread, (*module.parameters(), *module.buffers())))
