"""Operations in which all ranks of a group take part, beside the averaging of gradients."""

import pickle
from contextlib import suppress
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.connections import UNKNOWN_PEER, ConnectionLost, Group, start, wait
from lightning_hybrid.errors import HybridError


def broadcast_object(
    group: Group, value: Any, source: int = 0, device: torch.device | None = None
) -> Any:
    """Give every rank of ``group`` the object of the rank with index ``source``.

    Args:
        group: of gloo; of another backend with the ``device`` that it works on.
        value: the object; ignored on the other ranks.
        source: index of the rank that has it.
        device: where the group's tensors live, by default the CPU.

    Raises:
        ConnectionLost: a rank is gone, or late.
    """
    if group.size() == 1:
        return value
    here = group.rank() == source
    data = pickle.dumps(value, protocol=5) if here else b""
    size = torch.tensor([len(data)], device=device)
    # nobody can have memory for what comes before its size is known
    _broadcast(group, size, source)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if here else None
    if buffer is None:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    buffer = buffer.to(device or buffer.device)
    _broadcast(group, buffer, source)
    return value if here else pickle.loads(buffer.cpu().numpy().tobytes())


def _broadcast(group: Group, tensor: Tensor, source: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = source
    wait(start(group.broadcast, [tensor], options, peer=UNKNOWN_PEER), UNKNOWN_PEER)


def gather_objects(group: Group, value: Any) -> list[Any]:
    """The objects of all ranks of a gloo ``group``, on every one of them."""
    # pickled objects are of unequal sizes, and a collective wants equal ones
    return [broadcast_object(group, value, source) for source in range(group.size())]


def meet(group: Group, *, failed: bool = False, place: str = "") -> bool:
    """Wait until every rank of ``group`` is here. Returns whether none of them has failed.

    Args:
        group: of gloo.
        failed: whether this rank has.
        place: where in the program this is, the same on all ranks.

    Raises:
        ConnectionLost: a rank is gone, or late.
        HybridError: the ranks have come to different places, and would wait for each other later.
    """
    flag, work = _begin_meeting(group, failed=failed, place=place)
    wait(work, UNKNOWN_PEER)
    has_failed, highest, lowest = flag.tolist()
    if not has_failed and highest != -lowest:
        raise HybridError(
            f"This rank has come to {place or 'a barrier'}, and another one to another place: all "
            "ranks have to call the Trainer, and what it does on all of them, in the same order. "
            "Look for a call behind a condition on the rank (trainer.is_global_zero)."
        )
    return not has_failed


def fail_next_meeting(group: Group, timeout: timedelta) -> None:
    """A rank that has failed takes part in the next :func:`meet`, so that it returns ``False``.

    Ranks that come to it later than ``timeout`` still learn it, as long as this process lives.
    """
    # a rank that is gone needs no telling
    with suppress(ConnectionLost, RuntimeError):
        _begin_meeting(group, failed=True, place="")[1].wait(timeout)


def _begin_meeting(group: Group, *, failed: bool, place: str) -> tuple[Tensor, dist.Work]:
    # the largest n and the largest -n are opposite only where all ranks have the same n
    number = crc32(place.encode())
    flag = torch.tensor([int(failed), number, -number])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return flag, start(group.allreduce, [flag], options, peer=UNKNOWN_PEER)
