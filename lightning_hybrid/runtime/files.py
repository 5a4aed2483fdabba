"""What the workers of a replica own, as their driver maps it from files that they write.

See :mod:`lightning_hybrid.runtime.tensor_file`. A rank that cannot read the file of another one, as
on another host, is told so, and what it needs travels.
"""

from typing import Any

from lightning_hybrid.comm.protocol import KeepStates, KeepTensors
from lightning_hybrid.runtime.commands import Commands
from lightning_hybrid.runtime.tensor_file import Ticket, read_files


class FilesOfWorkers:
    """What the workers write for their driver.

    Args:
        commands: to the workers.
        folder: where files are written, if possible.

    Attributes:
        readable: whether they can be read here; false since one could not be, as on another host.
    """

    def __init__(self, commands: Commands, folder: str) -> None:
        self.folder, self.readable = folder, True
        self._commands = commands

    def tensors(self, *, at_end: bool = False) -> tuple[dict[int, Ticket], list[Any]] | None:
        """Their weights and buffers, ``"weights"``; at the end of a run also ``"gradients"``.

        Returns:
            The tickets of the files by ``pp_rank``, and what is in each; ``None``: they cannot be
            read here.
        """
        return self._ask(KeepTensors(self.folder, at_end))

    def states(self, index: int) -> dict[str, dict[str, Any]] | None:
        """The states of one of their optimizers, by name of the parameter; ``None``: see above."""
        found = self._ask(KeepStates(index, self.folder))
        if found is None:
            return None
        return {name: state for file in found[1] for name, state in file.items()}

    def _ask(self, command: KeepTensors | KeepStates) -> tuple[dict[int, Ticket], list[Any]] | None:
        if not self.readable:
            return None
        answers = [answer.value for answer in self._commands.ask(command)]
        files = None if None in answers else read_files(answers)
        self.readable = files is not None
        return None if files is None else (dict(zip(self._commands.workers.ranks, answers)), files)
