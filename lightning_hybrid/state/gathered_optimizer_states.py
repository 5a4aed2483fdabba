"""Brings the states that the replicas have of an optimizer to one rank, tensor by tensor."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.comm import (
    ANOTHER_REPLICA,
    Group,
    TensorSpec,
    bytes_of,
    gather_objects,
    start,
    wait,
)
from lightning_hybrid.state.optimizer_state import outlined
from lightning_hybrid.state.tensor_file import PIECE_BYTES, TensorFile, let_go, read_files

States = dict[str, dict[str, Any]]
"""The states of one optimizer: by name of the parameter, its state by key."""


def gather_states(group: Group, mine: States, folder: str) -> States:
    """On the first rank of a group: the states of all others, mapped from a file; elsewhere empty.

    Collective. A rank takes no memory beside its own states but for one piece of a tensor.

    Args:
        group: a gloo group.
        mine: the states of this rank.
        folder: for the file, if possible.

    Raises:
        OSError: there is no room for the file.
    """
    outlines: list[States] = gather_objects(
        group, {name: outlined(state) for name, state in mine.items()}
    )
    if group.rank():
        for name, state in outlines[group.rank()].items():
            for key, spec in state.items():
                if isinstance(spec, TensorSpec):
                    _send(group, spec.laid_out(mine[name][key]))
        return {}
    found: States = {}
    for source, theirs in enumerate(outlines[1:], 1):
        with closing(TensorFile(folder)) as file:
            stored = {
                name: {key: _stored(file, group, source, value) for key, value in state.items()}
                for name, state in theirs.items()
            }
            for states in read_files([file.ticket(stored)]) or ():
                found |= states
    return found


def _send(group: Group, tensor: Tensor) -> None:
    for piece in bytes_of(tensor).split(PIECE_BYTES) if tensor.numel() else ():
        here = piece.cpu()
        wait(start(group.send, [here], 0, 0, peer=ANOTHER_REPLICA), ANOTHER_REPLICA)
        let_go(here.numpy().data)  # (it may be mapped from a worker's file)


def _stored(file: TensorFile, group: Group, source: int, value: Any) -> Any:
    if not isinstance(value, TensorSpec):
        return value
    if 0 in value.shape:
        return value.empty(torch.device("cpu"))
    return file.store(value, _pieces(group, source, value))


def _pieces(group: Group, source: int, spec: TensorSpec) -> Iterator[Tensor]:
    left = torch.Size(spec.shape).numel() * spec.dtype.itemsize
    # one piece bounds the memory of both ends, however large the tensor
    buffer = torch.empty(min(left, PIECE_BYTES), dtype=torch.uint8)
    while left:
        piece = buffer[: min(left, PIECE_BYTES)]
        wait(start(group.recv, [piece], source, 0, peer=ANOTHER_REPLICA), ANOTHER_REPLICA)
        yield piece
        left -= piece.numel()
