"""A checkpoint for a process whose address space has no room for it: read tensor by tensor.

Torch reads a storage, it is written to a file without a name and forgotten, and the tensor is read
from there when it is needed (:mod:`lightning_hybrid.tensors.unread`). So what is in memory at once
is the largest tensor.
"""

from pathlib import Path
from typing import Any

import torch

from lightning_hybrid._torch.tensors import storage_key
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.runtime.tensor_file import NoAddresses, TensorFile
from lightning_hybrid.tensors import Unread

_SMALL_BYTES = 2**16
"""A storage of at most this is read at once."""


def load_unread(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint, its large tensors unread.

    Args:
        path: of the file.
        weights_only: as in `torch.load`.

    Raises:
        NoAddresses: something other than containers has tensors that are large.
    """
    file = TensorFile(str(Path(path).parent))
    kept: dict[int, tuple[torch.UntypedStorage, Unread]] = {}

    def keep(storage: Any, _: str) -> Any:
        if storage.nbytes() <= _SMALL_BYTES:
            return storage
        empty = torch.UntypedStorage(storage.nbytes(), device="meta")
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        kept[storage_key(empty)] = empty, Unread(file.keep(memory))
        return empty

    loaded: dict[str, Any] = torch.load(path, map_location=keep, weights_only=weights_only)
    left = set(kept)
    for steps, tensor in tensors_in(loaded):
        key = storage_key(tensor.untyped_storage()) if tensor.is_meta else None
        if key in kept:
            kept[key][1].open(tensor, ".".join(str(name) for _, name in steps))
            left.discard(key)
    if left:
        raise NoAddresses(
            f"The checkpoint {str(path)!r} has {len(left)} large tensors in objects that are no "
            "containers, and the address space of this process has no room to map all of it. "
            "Raise `ulimit -v`."
        )
    return loaded
