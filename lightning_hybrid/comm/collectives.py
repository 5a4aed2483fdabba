"""Collectives for Python objects (broadcast, gather) and a barrier that notices failures."""

import pickle
import time
from collections.abc import Callable
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
    """Give every rank of ``group`` the object of one of its ranks; all its ranks call it.

    Args:
        group: a process group.
        value: the object, of any class that can be pickled; ignored on the other ranks.
        source: index in the group of the rank that has the object.
        device: device of the tensors that the group's backend takes; ``None``: the CPU, for gloo.

    Returns:
        The object.

    Raises:
        ConnectionLost: a rank is gone, or has not answered within the time-out.
    """
    if group.size() == 1:
        return value
    here = group.rank() == source
    data = pickle.dumps(value, protocol=5) if here else b""
    size = torch.tensor([len(data)], device=device)
    # receivers need the size first, to allocate memory
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
    """Give every rank of a gloo ``group`` the objects of all its ranks, which all call this.

    Args:
        group: the group.
        value: this rank's object, of any class that can be pickled.

    Returns:
        The objects, by index of the rank in the group.
    """
    # not an all-gather: it wants tensors of one size, which pickled objects do not have
    return [broadcast_object(group, value, source) for source in range(group.size())]


_NAP_S, _LONG_NAP_S = 1e-4, 0.05


def meet(
    group: Group,
    *,
    failed: bool = False,
    place: str = "",
    look: Callable[[], None] | None = None,
) -> bool:
    """Wait until every rank of ``group`` calls this (a barrier).

    Args:
        group: a process group of gloo.
        failed: whether this rank has failed.
        place: name of the place in the program; must be equal on all ranks.
        look: called again and again while this rank waits; it may raise an exception to end the
            wait. ``None``: nothing is called.

    Returns:
        Whether none of the ranks has failed.

    Raises:
        ConnectionLost: a rank is gone, or has not answered within the time-out.
        HybridError: the ranks have called it from different places. If they went on, they would
            wait for each other for ever.
    """
    flag, work = _begin_meeting(group, failed=failed, place=place)
    nap_s = _NAP_S
    while look is not None and not work.is_completed():
        look()
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONG_NAP_S)
    wait(work, UNKNOWN_PEER)
    has_failed, highest, lowest = flag.tolist()
    if not has_failed and highest != -lowest:
        raise HybridError(
            f"This rank has come to {place or 'a barrier'}, and another one to another place: all "
            "ranks have to call the Trainer, and what it does on all of them, in the same order. "
            "Look for a call behind a condition on the rank (trainer.is_global_zero)."
        )
    return not has_failed


def agree(group: Group, number: float | None) -> bool:
    """Whether all ranks of a gloo ``group`` have the same number; all of them call it together.

    Args:
        group: the group.
        number: this rank's number; ``None``: the result is false on all ranks.
    """
    seen = torch.tensor([number is None, number or 0.0, -(number or 0.0)], dtype=torch.float64)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    wait(start(group.allreduce, [seen], options, peer=UNKNOWN_PEER), UNKNOWN_PEER)
    refused, highest, lowest = seen.tolist()
    return not refused and highest == -lowest


def fail_next_meeting(group: Group, timeout: timedelta) -> None:
    """Take part in the next :func:`meet` as a failed rank: it returns ``False`` on the other ranks.

    Raises nothing if ranks are lost.

    Args:
        group: the group of that meeting.
        timeout: how long to wait for the other ranks. Ranks that come later still learn of the
            failure, as long as this process lives.
    """
    # (this rank has failed itself: the loss of another rank does not matter to it)
    with suppress(ConnectionLost, RuntimeError):
        _begin_meeting(group, failed=True, place="")[1].wait(timeout)


def _begin_meeting(group: Group, *, failed: bool, place: str) -> tuple[Tensor, dist.Work]:
    # the largest n and the largest -n are opposite only where all ranks have the same n
    number = crc32(place.encode())
    flag = torch.tensor([int(failed), number, -number])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return flag, start(group.allreduce, [flag], options, peer=UNKNOWN_PEER)
