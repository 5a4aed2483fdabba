"""Gives a driver the trained weights after a run: workers write what they own, and it maps that.

Where it cannot read a worker's file, as on another host, this reports so, and its caller has the
weights sent.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.weights import FilesOfWorkers, Weights
from lightning_hybrid.planning import free_on, gigabytes, optimizer_bytes
from lightning_hybrid.remote import is_unread, materialize, refuse_lost
from lightning_hybrid.stage import tensors_of
from lightning_hybrid.state import put_mapped


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

    def map_tensors(self, *, but: frozenset[str] = frozenset()) -> bool:
        """Map the weights, buffers and gradients of the workers into the module on this rank.

        Args:
            but: names of those that this rank has already.

        Returns:
            Whether this rank can read the files; else nothing has changed.
        """
        remote = self._commands.remote
        remote.adopt_replaced(computes=False)
        owned = self._weights.owned_elsewhere()
        elsewhere = {name: tensor for name, tensor in owned.items() if name not in but}
        found = self._files.tensors(at_end=True, but=but) if elsewhere else []
        if found is None:
            return False
        for file in found:
            weights = {name: v for name, v in file["weights"].items() if name in elsewhere}
            put_mapped(self._module, weights)
        remote.adopt_fetched()
        remote.leave_gradients({n: g for file in found for n, g in file["gradients"].items()})
        return True

    def lacking(self, device: torch.device, optimizers: Iterable[Optimizer]) -> str:
        """Why this rank has no room for the tensors of all ranks in its memory; empty: it has.

        Args:
            device: the device of this rank, which would get weights, gradients and states.
            optimizers: the user's optimizers.
        """
        with as_they_are():
            weights = sum(tensor.nbytes for tensor in self._weights.owned_elsewhere().values())
            whole = sum(tensor.nbytes for tensor in tensors_of(self._module).values())
        states = sum(optimizer_bytes(self._module, optimizers).values())
        # it gets the weights of the others, their gradients, and their states
        needed = weights * 2 + round(states * weights / max(1, whole))
        free = free_on(device)
        if free is None or needed <= free:
            return ""
        return (
            f"The {gigabytes(weights)} of weights that other ranks have trained stay there and end "
            "with the run: the driver cannot read the files of these ranks (they are on another "
            "host, or there is no room for files), with gradients and states of optimizers they "
            f"would take {gigabytes(needed)} on {device}, and {gigabytes(free)} are free. "
            "Checkpoints of the run have all of them; a parameter of another rank cannot be read "
            "after it."
        )


def bring_here(module: nn.Module) -> None:
    """Read the tensors of a module that an earlier run has left in files, before another run.

    Raises:
        NoAddresses: the address space has no room for them.
        DeferredError: an earlier run has failed, and one was lost with another rank.
    """
    tensors = (*module.parameters(), *module.buffers())
    refuse_lost(tensors)
    materialize(filter(is_unread, tensors))
