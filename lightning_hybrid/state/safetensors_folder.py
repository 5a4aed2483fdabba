"""Weights as a folder of safetensors files, as `from_pretrained` of transformers reads it."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_hybrid.errors import HybridError, PlanError
from lightning_hybrid.profiling import give_back_memory
from lightning_hybrid.remote import value_of
from lightning_hybrid.state.replaced_files import becoming, new_folder
from lightning_hybrid.state.sharded_checkpoint import named_disk_errors, shared_memory_of
from lightning_hybrid.state.tensor_file import let_go_of_checkpoints

_BESIDE = (".json", ".txt", ".model", ".jinja", ".py")
"""Endings of files that stand beside weights: of a config, a tokenizer, the network's own code."""


def write_safetensors(
    weights: Mapping[str, Any], folder: Path, shard_bytes: float, like: Path | None = None
) -> None:
    """Write weights to a new folder of safetensors files, with memory for one file at a time.

    (While a tensor is read from a sharded checkpoint, it needs memory once more.) Of weights that
    share memory (tied ones) the first is written, as by `save_pretrained`.

    Args:
        weights: the weights by name; unread ones are read when their file is written.
        folder: the folder; it gets its name when all is written.
        shard_bytes: the largest size of a file; a file of a single tensor is possibly larger.
        like: a folder of the same kind of network, from which config and tokenizer are copied.

    Raises:
        PlanError: safetensors is not installed.
        HybridError: something among the weights is no tensor.
        OSError: a file could not be written.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise PlanError(
            f"{str(folder)!r} cannot be written: safetensors is not installed. "
            "Install it (`pip install safetensors`), or leave `--to safetensors` out."
        ) from error
    shards = list(_shards(_first_names(weights), shard_bytes))
    files = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    with becoming(new_folder(folder), folder) as new, named_disk_errors(folder):
        for file, shard in zip(files, shards):
            numbers = {name: value_of(tensor).contiguous() for name, tensor in shard.items()}
            save_file(numbers, new / file, {"format": "pt"})
            del numbers  # before those of the next file are read
            give_back_memory()
            let_go_of_checkpoints()
        if len(shards) > 1:
            where = {name: file for file, shard in zip(files, shards) for name in shard}
            size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
            index = {"metadata": {"total_size": size}, "weight_map": where}
            (new / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for path in like.iterdir() if like is not None else ():
            if path.suffix in _BESIDE and not path.name.endswith(".index.json"):
                shutil.copy(path, new)


def _first_names(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights by name, each memory once: under the first of its names.

    Raises:
        HybridError: something among the weights is no tensor.
    """
    found: dict[object, tuple[str, Tensor]] = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise HybridError(
                f"{name!r} is a {type(tensor).__name__} and no tensor, which safetensors cannot "
                "hold. Name the network alone that is to be written (--network)."
            )
        found.setdefault(shared_memory_of(tensor), (name, tensor))
    return dict(found.values())


def _shards(weights: Mapping[str, Tensor], most: float) -> Iterator[dict[str, Tensor]]:
    """Divide weights, in their order, into the files that they are written to.

    Args:
        weights: the weights by name.
        most: most bytes of a file; a larger weight is alone in its file.
    """
    shard, size = dict[str, Tensor](), 0
    for name, tensor in weights.items():
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
