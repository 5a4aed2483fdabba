"""Checkpoints in a folder, to which each rank writes what it owns (torch's distributed checkpoint).

The folder is as Lightning's strategy for FSDP writes it::

    .metadata       what is where, as `torch.distributed.checkpoint` writes it
    __0_0.distcp    the tensors of rank 0, then a file for each further rank
    meta.pt         the rest of the checkpoint, and an outline of it all: tensors without numbers

The keys of tensors are those of the ordinary checkpoint, dotted: ``state_dict.net.weight``,
``optimizer_0.state.3.exp_avg``. Ranks need no process group to write it: each one plans its own
part, and the driver joins the parts to the metadata. A reader follows the outline, tensor by
tensor, whichever ranks have written it.

In which order checkpoints are saved and removed is in `sharded_save_order`.
"""

import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.storage import WriteResult

from lightning_hybrid._torch.tensors import as_they_are, storage_key
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.comm import TensorSpec, bytes_of
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import is_deferred, materialize, streaming, unread, unread_place_of

META = "meta.pt"
"""The file with the rest of the checkpoint, named as by Lightning."""
_METADATA = ".metadata"
_OUTLINE = "lightning_hybrid"
_DIVIDED = ("state_dict", "optimizer_states")
_SMALL_BYTES = 2**16
"""A tensor of at most so many bytes is read when the checkpoint is loaded."""

_POLL_S = 0.02
LAST_S = 10.0
"""Seconds for which the ranks of a failed run go on writing a checkpoint begun before."""

Key = tuple[str, ...]
"""The key of a tensor in the folder; joined by dots it is the name that torch gives it."""


@dataclass(frozen=True)
class TensorAddress:
    """A tensor that another rank has.

    Attributes:
        rank: number of that rank in the mesh, replica by replica.
        name: dotted name of the parameter or buffer in the LightningModule.
        optimizer: number of the optimizer, if the tensor is a part of the state of the parameter;
            ``None``: it is the parameter or buffer itself.
        state: key of the tensor in that state (``exp_avg``).
    """

    rank: int
    name: str
    optimizer: int | None = None
    state: str = ""


@dataclass(frozen=True)
class DividedCheckpoint:
    """A checkpoint, divided into what this rank, other ranks and `meta.pt` get.

    Attributes:
        here: tensors that this rank writes.
        elsewhere: tensors that other ranks write, by the ranks' numbers in the mesh.
        rest: what `meta.pt` gets: everything but these tensors, and an outline of these.
    """

    here: dict[Key, Tensor]
    elsewhere: dict[int, dict[Key, TensorAddress]]
    rest: dict[str, Any]

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> "DividedCheckpoint":
        """Divide an ordinary checkpoint of Lightning's.

        Args:
            checkpoint: the checkpoint, with unread tensors from :func:`unread_there` for what
                other ranks have. It stays as it is.
        """
        here, elsewhere = dict[Key, Tensor](), dict[int, dict[Key, TensorAddress]]()
        rest, outlined = dict(checkpoint), dict[str, Any]()
        known: dict[Any, Tensor] = {}  # a tensor that occurs twice (a tied weight) is written once
        for part, value in checkpoint.items():
            outlines: dict[int, Any] = {}
            for steps, tensor in tensors_in(value):
                owned = unread_place_of(tensor)
                if owned is None and not (part in _DIVIDED and _is_plain(tensor)):
                    continue
                same = owned or shared_memory_of(tensor)
                if same not in known:
                    known[same] = _outline(tensor)
                    key = _key(part, [step for _, step in steps])
                    if owned is None:
                        here[key] = tensor
                    else:
                        elsewhere.setdefault(owned.rank, {})[key] = owned
                outlines[id(tensor)] = known[same]
            if outlines:
                # `outlines` as the memo of the copy: so each tensor is replaced by its outline
                outlined[part] = deepcopy(rest.pop(part), outlines)
        return cls(here, elsewhere, {**rest, _OUTLINE: outlined})


def _is_plain(tensor: Tensor) -> bool:
    # (other classes may need their own code to be read again: they go to `meta.pt`)
    known = type(tensor) in (Tensor, nn.Parameter) or is_deferred(tensor)
    dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)
    return known and dense


def shared_memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that show the same memory in the same way.

    That is: with the same storage, offset, shape, strides and type.
    """
    with as_they_are():
        place = storage_key(tensor.untyped_storage()), tensor.storage_offset()
        return *place, tensor.shape, tensor.stride(), tensor.dtype


def _outline(tensor: Tensor) -> Tensor:
    with as_they_are():
        spec = TensorSpec.of(tensor, gradient=False)
        return dataclasses.replace(spec, on_cpu=False).empty(torch.device("meta"))


def unread_there(
    spec: TensorSpec, owned: TensorAddress | None, read: Callable[[], Tensor]
) -> Tensor:
    """Make an unread tensor, whose values are fetched when they are used.

    Args:
        spec: shape, type and strides of the tensor.
        owned: which rank writes it to a sharded checkpoint; ``None``: this rank.
        read: fetches the tensor, to any device.
    """
    form = dataclasses.replace(spec, on_cpu=False).empty(torch.device("meta"))

    def numbers() -> Tensor:
        return bytes_of(spec.laid_out(read())).cpu()

    return unread(form, numbers, place=owned)


def _key(part: str, steps: Sequence[Any]) -> Key:
    """Make the key of a tensor from the part of the checkpoint and the steps to it in this part."""
    if part == "optimizer_states":  # as Lightning names them there
        number, *steps = steps
        part = f"optimizer_{number}"
    return part, *map(str, steps)


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class Shard:
    """The record of what a rank has written to a checkpoint, for the metadata.

    Attributes:
        plan: the tensors that it has written, as torch's planner lists them.
        written: in which file, and where in it, each tensor is.
    """

    plan: SavePlan
    written: list[WriteResult]


def write_shard(folder: str | Path, rank: int, tensors: Mapping[Key, Tensor]) -> Shard:
    """Write a rank's part of a checkpoint to its file.

    Args:
        folder: the folder of the checkpoint, which all ranks write to.
        rank: number of the rank in the mesh, which is in the file's name.
        tensors: the rank's tensors, by key.

    Returns:
        The record of what was written, for :func:`finish`.

    Raises:
        OSError: the folder is not on this host, or there is no room in it.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"The folder {str(folder)!r}, which the driver has made for a sharded checkpoint, is "
            "not on this host: all hosts must share its file system. Save to one that they share, "
            "or use HybridGabraStrategy(checkpoint='full')."
        )
    # torch makes the dotted names by flattening nested dicts
    nested: dict[str, Any] = {}
    for (*outer, last), tensor in tensors.items():
        inside = nested
        for step in outer:
            inside = inside.setdefault(step, {})
        inside[last] = _to_write(tensor)
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    planner.set_up_planner(nested)
    # the writer names a file by the index of its plan, so empty ones stand for the ranks before
    plans = [*[SavePlan([])] * rank, planner.create_local_plan()]
    plan = writer.prepare_global_plan(plans)[rank]
    with streaming(), named_disk_errors(folder):
        return Shard(plan, writer.write_data(plan, planner).wait())


@contextmanager
def named_disk_errors(path: str | Path) -> Iterator[None]:
    """Inside, errors of `torch.save` become an OSError with reason and ``path``, if a write failed.

    (Torch's own error possibly says only how many bytes it has written.)
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(error, HybridError) or not isinstance(cause, OSError):
            raise
        # an OSError of a write has a number and names no file; others come from the objects that
        # are saved, and say what is wrong
        if cause.errno is None or cause.filename is not None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from None


def _to_write(tensor: Tensor) -> Tensor:
    """Return a tensor for torch's writer, which keeps what it is given until it has written all.

    So a tensor on a GPU is returned as an unread one, and a deferred tensor as it is: the writer
    reads these one by one.
    """
    if is_deferred(tensor):
        return tensor
    spec = TensorSpec.of(tensor, gradient=False)
    if tensor.device.type == "cpu":
        return spec.laid_out(tensor)
    # read when it is written: else the writer would keep all copies on the CPU until the end
    return unread_there(spec, None, lambda: tensor)


def staged(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Return copies of tensors on the CPU, which can be written while training goes on.

    Args:
        tensors: the tensors by key; the copies have the same keys.
    """
    # (tensors on the CPU are copied too: the next step changes the weights in place)
    return {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}


def leave_shard(folder: str, rank: int, shard: Shard | OSError) -> None:
    """On a worker: leave a record of what it has written in the background, for the driver.

    It is a file in the folder, for which the driver waits by :func:`await_shard`.

    Args:
        folder: the folder of the checkpoint.
        rank: number of the worker in the mesh.
        shard: the record, or the error with which the write has failed.
    """
    beside = Path(folder, f"{rank}.part")
    beside.write_bytes(pickle.dumps(shard))
    # renamed when it is complete, since the driver waits for the name
    beside.rename(_path_of_record(folder, rank))


def await_shard(folder: Path, rank: int, given_up: Event) -> Shard:
    """On the driver: wait for the record that :func:`leave_shard` leaves on a worker.

    Args:
        folder: the folder of the checkpoint.
        rank: number of the worker in the mesh.
        given_up: is set when the run has failed, and the worker is possibly gone.

    Returns:
        The record.

    Raises:
        OSError: the worker could not write its part.
        TimeoutError: ``given_up`` was set.
    """
    # a file and not a message, since the driver goes on with the training meanwhile
    left = _path_of_record(folder, rank)
    while not left.exists():
        if given_up.wait(_POLL_S):
            raise TimeoutError(f"rank {rank} has not written its part of {str(folder)!r}")
    shard: Shard | OSError = pickle.loads(left.read_bytes())
    left.unlink()
    if isinstance(shard, OSError):
        raise shard
    return shard


def _path_of_record(folder: str | Path, rank: int) -> Path:
    """Path of the file in which :func:`leave_shard` leaves the record of a worker."""
    return Path(folder, f"{rank}.shard")


def write_rest(folder: Path, rest: Mapping[str, Any]) -> None:
    """Write `meta.pt` to a checkpoint's folder.

    Args:
        folder: the folder of the checkpoint.
        rest: what is in no rank's file: ``rest`` of a :class:`DividedCheckpoint`.
    """
    with (folder / META).open("wb") as file, named_disk_errors(folder):
        torch.save(rest, file)


def finish(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the metadata, which joins the parts of all ranks, and flush all files to the disk.

    Args:
        folder: the folder of the checkpoint, to which all ranks have written their parts.
        shards: the record of each rank, in the order of their numbers in the mesh.
    """
    _, metadata = DefaultSavePlanner().create_global_plan([shard.plan for shard in shards])
    FileSystemWriter(folder).finish(metadata, [shard.written for shard in shards])
    # all of it must be on the disk before the folder gets its name
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def save_alone(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """Write a whole sharded checkpoint from this rank alone.

    Args:
        checkpoint: an ordinary checkpoint, whose tensors this rank has or can read.
        folder: an empty folder.
    """
    divided = DividedCheckpoint.of(checkpoint)
    write_rest(folder, divided.rest)
    finish(folder, [write_shard(folder, 0, divided.here)])


# ---------------------------------------------------------------- reading


def is_sharded(path: str | Path) -> bool:
    """Whether there is a sharded checkpoint at a path: a folder with metadata and `meta.pt`."""
    return all((Path(path) / name).is_file() for name in (META, _METADATA))


def read_sharded(folder: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a sharded checkpoint as an ordinary one; large tensors are read when they are needed.

    Args:
        folder: the folder of the checkpoint.
        weights_only: as in `torch.load`, for `meta.pt`.

    Raises:
        HybridError: the folder holds something else.
    """
    if not is_sharded(folder):
        raise HybridError(
            f"The folder {str(folder)!r} is no sharded checkpoint: it lacks {META} or {_METADATA}. "
            "Give a folder that HybridGabraStrategy(checkpoint=Sharded()) has saved, or a file."
        )
    rest = torch.load(Path(folder) / META, map_location="cpu", weights_only=weights_only)
    if _OUTLINE not in rest:
        raise HybridError(
            f"The sharded checkpoint {str(folder)!r} was written by another strategy. Make an "
            "ordinary file of it with "
            "`python -m lightning.pytorch.utilities.consolidate_checkpoint`."
        )
    outlined = rest.pop(_OUTLINE)
    stored = _Folder(folder)
    seen = set[int]()
    for part, value in outlined.items():
        for steps, tensor in tensors_in(value):
            key = ".".join(_key(part, [step for _, step in steps]))
            # a tied weight stands in the outline twice, and is opened once
            if tensor.is_meta and id(tensor) not in seen and key in stored:
                unread(tensor, stored.reader(key, tensor), name=key)
                # small ones now: there are many, and a read of each by itself takes long
                if tensor.nbytes <= _SMALL_BYTES:
                    materialize([tensor])
            seen.add(id(tensor))
    return {**rest, **outlined}


class _Folder:
    """Reads tensors of the sharded checkpoint in a folder; ``in`` tells whether a key is there.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self._reader = FileSystemReader(folder)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def __contains__(self, key: str) -> bool:
        return key in self._metadata.state_dict_metadata

    def reader(self, key: str, outline: Tensor) -> Callable[[], Tensor]:
        """Make a function that reads a tensor and returns it as bytes, for :func:`unread`.

        Args:
            key: the dotted key of the tensor.
            outline: a tensor that has its size, strides and type.
        """
        size = outline.shape
        stride = outline.stride()
        dtype = outline.dtype

        def read() -> Tensor:
            tensor = torch.empty_strided(size, stride, dtype=dtype)
            # the key is the dotted name already
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            planner.set_up_planner({key: tensor}, self._metadata)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
            return bytes_of(tensor)

        return read
