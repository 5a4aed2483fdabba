"""The files in which a worker leaves tensors for other ranks, and its reading of theirs.

See :mod:`lightning_hybrid.state.tensor_file`.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are, is_shared
from lightning_hybrid.remote import is_unread, is_vacant, leave_unread, value_of
from lightning_hybrid.stage import tensors_of
from lightning_hybrid.state.tensor_file import TensorFile, Ticket, read_files


class FilesOfWorker:
    """Writes tensors of a worker to a file for other ranks, and maps the files of others.

    Args:
        module: the LightningModule of this rank.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._file: TensorFile | None = None

    def write(self, value: Any, folder: str) -> Ticket | None:
        """Write tensors to a file that is kept until the next call; ``None``: there is no room."""
        self.close()
        with suppress(OSError):
            self._file = TensorFile(folder)
            return self._file.write(value)
        return None

    def read(self, tickets: Sequence[Ticket], owned: Collection[str]) -> bool:
        """Map the weights of other ranks into this rank's module.

        Args:
            tickets: of the other ranks' files.
            owned: names of the tensors that this rank owns, which are copied to.

        Returns:
            Whether the files could be read.
        """
        files = read_files(tickets)
        if files is None:
            return False
        for file in files:
            put_mapped(self._module, file["weights"], owned)
        return True

    def close(self) -> None:
        """Close the file; all other ranks have opened it by now."""
        if self._file is not None:
            self._file.close()
            self._file = None


def put_mapped(
    module: nn.Module, values: Mapping[str, Tensor], owned: Collection[str] = ()
) -> None:
    """Give parameters and buffers the values that are mapped from a file.

    Those that this rank owns, or that others share memory with, keep their memory, and are copied
    to.
    """
    tensors = tensors_of(module)
    with torch.no_grad(), as_they_are():
        for name, value in values.items():
            tensor = tensors[name]
            alike = tensor.shape == value.shape and tensor.layout is value.layout is torch.strided
            if is_unread(value):
                # (views of this memory would keep the old numbers if it were replaced)
                if name in owned or (not is_vacant(tensor) and is_shared(tensor)):
                    tensor.copy_(value_of(value))
                else:
                    leave_unread(tensor, name, value)
            elif is_vacant(tensor):
                tensor.data = value
            elif alike and (name in owned or tensor.device.type != "cpu" or is_shared(tensor)):
                tensor.copy_(value)
            else:
                tensor.data = value.to(tensor.device, tensor.dtype)
