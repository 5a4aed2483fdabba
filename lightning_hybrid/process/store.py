"""The store by which ranks find each other, and its end."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_hybrid.comm import bound_to

LETTING_GO_S = 0.2
"""How long a process waits, in seconds, between the last operation of its groups and its end.

Gloo says that an operation is over a moment before its thread has let go of it. A script that ends
within that moment takes the interpreter away from the thread, and C++ aborts the process: 18 of 170
that ended right after an all-reduce did so (torch 2.13), none of 45 that waited for 50 ms. Torch
has no call that waits for the thread, and leaves such processes to crash:
https://github.com/pytorch/pytorch/issues/190489."""

MEETING_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Meeting:
    """Where and how all ranks find each other, the same on each of them but for ``serve``.

    Attributes:
        address: host of the store.
        port: port of the store.
        hosts: number of hosts.
        serve: whether this rank hosts the store (rank 0, unless the launcher's agent already does).
    """

    address: str
    port: int
    hosts: int
    serve: bool


def make_store(meeting: Meeting, timeout: timedelta = MEETING_TIMEOUT) -> dist.TCPStore:
    """Host the store on the interface that the run needs, or connect to it.

    Args:
        meeting: where it is.
        timeout: how long to wait for the others.
    """
    address, port = meeting.address, meeting.port
    if not meeting.serve:
        return dist.TCPStore(address, port, None, False, timeout=timeout)
    listening = bound_to(address, port, meeting.hosts)
    return dist.TCPStore(address, port, None, True, timeout=timeout, master_listen_fd=listening)
