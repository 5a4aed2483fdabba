"""Writes a checkpoint to one file, tensor by tensor, and reads checkpoints of any form."""

import os
from pathlib import Path
from typing import Any, BinaryIO, cast
from zipfile import is_zipfile

import torch

from lightning_hybrid.remote import streaming
from lightning_hybrid.state.replaced_files import becoming, new_file
from lightning_hybrid.state.sharded_checkpoint import named_disk_errors, read_sharded
from lightning_hybrid.state.tensor_file import (
    PIECE_BYTES,
    let_go,
    load_unread,
    may_be_mapped,
    remember_mapped,
)


def save_checkpoint(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write a checkpoint to a file, which replaces another one when it is complete.

    Args:
        checkpoint: what to save; unread tensors (of other ranks) are fetched one by one.
        path: path of the file.

    Raises:
        OSError: the file cannot be written; what was there before is there still.
    """
    target = Path(path)
    with (
        becoming(new_file(target), target) as new,
        named_disk_errors(path),
        new.open("wb") as file,
        # weights of other ranks are fetched one by one as they are written: all may not fit
        streaming(),
    ):
        torch.save(checkpoint, cast(BinaryIO, _LettingGo(file)))
        file.flush()
        # contents first: a name without them would be an empty file after a power cut
        os.fsync(file.fileno())


def load_checkpoint(
    path: str | Path,
    map_location: Any = lambda storage, _: storage,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load a checkpoint from a file of this host; tensors are read only when they are needed.

    A file is mapped; where the address space has too little room for that, tensors are unread ones.

    Args:
        path: the file, or the folder of a sharded checkpoint.
        map_location: as in `torch.load`; used for files that are mapped or of an old format.
        weights_only: as in `torch.load`.

    Returns:
        The checkpoint as a dictionary.
    """
    if Path(path).is_dir():
        return read_sharded(path, weights_only)
    # (files of the format before torch 1.6 cannot be mapped)
    mapped = is_zipfile(path)
    if mapped:
        with Path(path).open("rb") as file:
            if not may_be_mapped(file):
                return load_unread(path, weights_only)
    # mapped, since a rank needs only some of it: pages that are not read take no memory
    loaded: dict[str, Any] = torch.load(
        path, map_location=map_location, weights_only=weights_only, mmap=mapped
    )
    if mapped:
        remember_mapped(path)
    return loaded


class _LettingGo:
    """A file to write to. Mapped memory from which data were written is given back at once.

    Args:
        file: the file to which it passes everything on.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        """Write data (a whole tensor, for example); return how many bytes were written."""
        written = 0
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            written += self._file.write(piece)
            let_go(piece)
        return written

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()
