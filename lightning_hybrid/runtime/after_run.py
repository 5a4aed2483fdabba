"""What ranks find of each other after a run: each keeps what it owns, the others map its file.

(Where a rank cannot read the file of another one, since it is on another host, weights travel.)
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are, is_shared, version
from lightning_hybrid.comm.protocol import KeepStates, KeepTensors, MapTensors
from lightning_hybrid.pipeline import tensors_of
from lightning_hybrid.runtime.commands import Commands
from lightning_hybrid.runtime.tensor_file import TensorFile, Ticket, read_files
from lightning_hybrid.runtime.weights import Weights


class AfterRun:
    """What the driver of a replica and its workers find of each other after a run.

    Args:
        module: the LightningModule.
        commands: to the workers.
        weights: of all stages.
        folder: where files are written.
    """

    def __init__(
        self, module: nn.Module, commands: Commands, weights: Weights, folder: str
    ) -> None:
        self._module, self._weights = module, weights
        self._commands, self._folder = commands, folder
        self._tickets: dict[int, Ticket] = {}
        self._versions: dict[str, int] = {}
        self._are_mapped = False

    def map_tensors(self) -> bool:
        """Have here the weights, buffers and gradients that the workers own.

        Returns:
            Whether that could be done; else nothing has happened.
        """
        self._commands.remote.adopt_replaced()
        elsewhere = self._weights.owned_elsewhere()
        tickets = self._ask(KeepTensors(self._folder)) if elsewhere else {}
        files = None if tickets is None else read_files(tickets.values())
        if tickets is None or files is None:
            return False
        self._tickets, self._are_mapped = tickets, True
        for file in files:
            weights = {name: v for name, v in file["weights"].items() if name in elsewhere}
            put_mapped(self._module, weights)
        self._commands.remote.adopt_fetched()
        self._commands.remote.leave_gradients(
            {name: value for file in files for name, value in file["gradients"].items()}
        )
        with as_they_are():
            self._versions = {name: version(tensor) for name, tensor in elsewhere.items()}
        return True

    def hand_out(self) -> bool:
        """Have on the workers the weights and buffers of all other ranks.

        Returns:
            Whether that could be done.
        """
        if not self._are_mapped:
            return False
        everyones = self._weights.everyones()
        mine = {n: t for n, t in everyones.items() if version(t) != self._versions.get(n)}
        file = TensorFile(self._folder)
        try:
            tickets = {**self._tickets, 0: file.write({"weights": mine})}
            answers = self._commands.ask(MapTensors(tickets))
        except OSError:
            return False
        finally:
            file.close()
        return all(answer.value for answer in answers)

    def states(self, index: int) -> Mapping[str, dict[str, Any]] | None:
        """The states of an optimizer on the workers, by name of the parameter.

        Returns:
            ``None`` where the files of the workers cannot be read.
        """
        tickets = self._ask(KeepStates(index, self._folder))
        files = None if tickets is None else read_files(tickets.values())
        if files is None:
            return None
        return {name: state for file in files for name, state in file.items()}

    def _ask(self, command: KeepTensors | KeepStates) -> dict[int, Ticket] | None:
        answers = self._commands.ask(command)
        tickets = dict(zip(self._commands.workers.ranks, (answer.value for answer in answers)))
        return None if None in tickets.values() else tickets


class FilesOfWorker:
    """The files of a worker, and what it maps of those of other ranks.

    Args:
        module: the LightningModule of this rank.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._files: list[TensorFile] = []

    def write(self, value: Any, folder: str) -> Ticket | None:
        """Keep tensors for other ranks, until :meth:`close`; ``None``: there is no room."""
        with suppress(OSError):
            self._files.append(TensorFile(folder))
            return self._files[-1].write(value)
        return None

    def read(self, tickets: Iterable[Ticket], owned: Collection[str]) -> bool:
        """Have here what other ranks own. Returns whether that could be done."""
        files = read_files(tickets)
        if files is None:
            return False
        for file in files:
            put_mapped(self._module, file["weights"], owned)
        return True

    def close(self) -> None:
        """All others have opened what they want to read."""
        for file in self._files:
            file.close()
        self._files.clear()


def put_mapped(
    module: nn.Module, values: Mapping[str, Tensor], owned: Collection[str] = ()
) -> None:
    """Let parameters and buffers have their numbers in a file.

    Those that this rank owns, or whose memory code has views of, keep their own memory.
    """
    tensors = tensors_of(module)
    with torch.no_grad(), as_they_are():
        for name, value in values.items():
            tensor = tensors[name]
            alike = tensor.shape == value.shape and tensor.layout is value.layout is torch.strided
            if alike and (name in owned or tensor.device.type != "cpu" or is_shared(tensor)):
                tensor.copy_(value)
            else:
                tensor.data = value.to(tensor.device, tensor.dtype)
