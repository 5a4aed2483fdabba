"""Process groups, and transfers of tensors over them, the layer below channels and links.

A :class:`Wire` joins this rank to one peer. :class:`GroupWire` works over a process group of
``torch.distributed``; tests have a wire between two threads, with the same guarantees.

gloo loses some sends whose peer is gone: the thread that finds a connection broken fails all
transfers that wait on it, and only then adds the send that it was writing itself. This send waits
for its time-out, half an hour by default. No call of torch wakes it, but a new transfer on the
connection raises at once. So :class:`StuckSends` has another thread probe the connection of every
send that takes more than a second; if the peer is gone and the send still waits after some seconds,
the process is killed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import py_object, pythonapi
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid._torch.autograd import unrecorded
from lightning_hybrid.comm.tags import ReservedTag
from lightning_hybrid.comm.threads import BackgroundThread, end_process
from lightning_hybrid.comm.travelling_errors import is_late
from lightning_hybrid.errors import HybridError, RemoteError

Group = Any
"""A process group, whose methods are called directly. (The classes of gloo's and NCCL's groups
have no public base class with these methods.)"""

ANOTHER_REPLICA = "a rank of another replica"
UNKNOWN_PEER = "a rank of the group"
"""The two names stand for the peer in an error of a collective, which cannot tell which rank is
lost."""
_UNKNOWN = (ANOTHER_REPLICA, UNKNOWN_PEER)
GRACE_S = 8.0
"""How many seconds a send may go on waiting for a peer that is known to be gone."""
_LOOK_EVERY_S = 1.0


class ConnectionLost(RemoteError):
    """The connection to a peer was closed, or the peer did not answer within the time-out.

    Args:
        text: the message.
        peer: the name of the peer; ``None``: this rank cannot tell which one it is.
        late: whether the peer did not answer within the time-out; its process possibly still
            exists.
    """

    def __init__(self, text: str, peer: str | None = None, *, late: bool = False) -> None:
        super().__init__(text)
        self.peer = peer
        self.late = late


class GroupHandle:
    """A process group that can be closed while other objects still refer to this handle.

    It has all methods of the group. Closing drops the only reference to the group, which destroys
    it. gloo's shutdown and abort wake no peer, but destroying the group closes its sockets, which
    wakes all peers. NCCL waits for its peers in a shutdown; an abort ends operations that wait on
    the device.

    Args:
        group: the group; ``None``: there is none, and its methods raise an error.
    """

    def __init__(self, group: Group = None) -> None:
        self._group = group
        self._lost: ConnectionLost | None = None

    def __getattr__(self, name: str) -> Any:
        if self._lost is not None:
            raise self._lost
        if self._group is None:
            raise RuntimeError("This rank has left the run, which has failed: it talks to nobody.")
        return getattr(self._group, name)

    def replace(self, other: "GroupHandle") -> None:
        """Take over the group of another handle, and drop the present one without waiting.

        Operations of the dropped group are possibly still under way.
        """
        self.drop()
        self._group = other._group

    @property
    def is_open(self) -> bool:
        """Whether the handle has a group: it was not closed, dropped or aborted."""
        return self._group is not None

    def drop(self) -> None:
        """Drop the group, without waiting for its other ranks.

        A thread waits for running operations, until the other ranks have closed their groups.
        """
        dropped, self._group = [self._group], None
        if any(dropped):
            # in a thread: it waits for running operations until the peers have closed theirs
            BackgroundThread(dropped.clear, "hybrid-drop", awaited=True).start()

    def keep(self) -> None:
        """Never destroy the group, not even at the end of the process.

        Called after a failure: destroying the group would wait for its running operations, which
        possibly never end.
        """
        pythonapi.Py_IncRef(py_object(self._group))

    def close(self) -> None:
        """Shut the group down and drop it; all ranks of the group call this together."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def abort(self, lost: ConnectionLost | None = None) -> None:
        """Abort the group's operations and drop it, without waiting; may be called from any thread.

        Args:
            lost: error that later uses of the group raise; ``None``: a ``RuntimeError`` which says
                that this rank has left the run.
        """
        if self._group is not None:
            # later callers get the reason, not the error of an aborted group
            self._lost = lost
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class Transfer(Protocol):
    """A send or a receive that has begun. Keep it until :meth:`wait` has returned.

    A transfer that is dropped earlier possibly never takes place.
    """

    def wait(self) -> None:
        """Wait until the transfer has ended.

        Raises:
            ConnectionLost: the peer is gone, or has not answered within the time-out.
        """


class Wire(Protocol):
    """A connection to one peer, in both directions.

    Tensors arrive at the other end in the order of the sends. A send possibly ends only when the
    peer has begun to receive. Do not change the tensor before :meth:`Transfer.wait` has returned.
    Several receives may be begun before their messages come; they are filled in the order in which
    they were begun.

    Attributes:
        peer: name of the other rank in errors.
    """

    peer: str

    def send(self, tensor: Tensor) -> Transfer:
        """Begin to send a contiguous tensor to the peer, which receives it by :meth:`receive`.

        The peer's tensor must have the same size and type. Does not wait.

        Raises:
            ConnectionLost: the peer is known to be gone.
        """

    def receive(self, tensor: Tensor) -> Transfer:
        """Begin to receive the peer's next tensor into a contiguous tensor; does not wait.

        Raises:
            ConnectionLost: the peer is known to be gone.
        """


Probe = Callable[[], object]
"""A function that raises a ``RuntimeError`` if the peer of a send is gone."""


class StuckSends:
    """Watches the sends that threads of this process wait for.

    A send is stuck if its peer is gone, and it still waits `GRACE_S` seconds later.

    Args:
        end: called once with the reason when a send is stuck, in the watching thread; it should end
            the process.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._waiting: dict[int, tuple[float, Probe]] = {}
        self._lock = Lock()
        self._thread: Thread | None = None
        self._over = Event()

    @contextmanager
    def watched(self, probe: Probe) -> Iterator[None]:
        """Context in which the caller waits for a send, which is watched meanwhile.

        Args:
            probe: raises a ``RuntimeError`` if the peer of the send is gone; called in another
                thread.
        """
        if self._thread is None:
            self._begin()
        key = id(probe)
        self._waiting[key] = monotonic(), probe
        try:
            yield
        finally:
            self._waiting.pop(key, None)

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._over = Event()
                self._thread = BackgroundThread(self._run, "hybrid-sends", self._over)
                self._thread.start()

    def close(self) -> None:
        """End the watching thread and join it; the next :meth:`watched` begins another one."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._over.set()
        if thread is not None:
            thread.join()

    def _run(self, over: Event) -> None:
        gone: dict[int, tuple[float, str]] = {}
        while not over.wait(_LOOK_EVERY_S):
            now, waiting = monotonic(), dict(self._waiting)
            # forget sends that have ended: the id of a probe may be used again for another peer
            gone = {key: seen for key, seen in gone.items() if key in waiting}
            for key, (since, probe) in waiting.items():
                # only sends that last: each probe begins a transfer
                if key not in gone and now - since > _LOOK_EVERY_S:
                    try:
                        probe()
                    except RuntimeError as error:
                        gone[key] = now, str(error)
            for since, reason in gone.values():
                if now - since > GRACE_S:
                    self._end(reason)
                    return


def _kill(reason: str) -> None:
    # an exception cannot wake a thread that waits inside of gloo
    end_process(f"{reason}. Process {os.getpid()} is killed: a send of it would wait for ever.")


SENDS = StuckSends(_kill)
"""Watches all sends of this process."""
if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads
    os.register_at_fork(after_in_child=lambda: SENDS.__init__(_kill))  # type: ignore[misc]


class GroupWire:
    """A wire over a process group.

    Args:
        group: a process group that has this rank and the peer.
        other: index of the peer in the group.
        peer: name of the peer in errors.
        tag: separates wires between the same two ranks of one gloo group: a send is matched only by
            a receive with the same tag. NCCL ignores it.
    """

    def __init__(self, group: Group, other: int, peer: str, tag: int = 0) -> None:
        self.peer = peer
        self._group = group
        self._other = other
        self._tag = tag

    def send(self, tensor: Tensor) -> Transfer:
        work = start(self._group.send, [tensor], self._other, self._tag, peer=self.peer)
        return _GroupTransfer(work, self, sends=True)

    def receive(self, tensor: Tensor) -> Transfer:
        work = start(self._group.recv, [tensor], self._other, self._tag, peer=self.peer)
        return _GroupTransfer(work, self)

    def probe(self) -> None:
        """Test whether the peer is still connected, by beginning a receive that nobody sends for.

        May be called from any thread. Does nothing over another backend than gloo.

        Raises:
            ConnectionLost: the peer is gone.
        """
        if self._group.name() == "gloo":
            start(
                self._group.recv, [torch.empty(1)], self._other, ReservedTag.PROBE, peer=self.peer
            )


class _GroupTransfer:
    def __init__(self, work: dist.Work, wire: GroupWire, *, sends: bool = False) -> None:
        self._work = work
        self._wire = wire
        self._sends = sends

    def wait(self) -> None:
        if not self._sends:
            wait(self._work, self._wire.peer)
            return
        with SENDS.watched(self._wire.probe):
            wait(self._work, self._wire.peer)


def start(call: Any, *arguments: Any, peer: str) -> dist.Work:
    """Begin a transfer or a collective of a process group; the caller must :func:`wait` for it.

    Args:
        call: the bound method of the process group that begins it, such as ``group.allreduce``.
        arguments: positional arguments of the method; the first is a list of tensors.
        peer: name of the other rank (or ranks) in errors.

    Returns:
        What :func:`wait` takes.

    Raises:
        ConnectionLost: ``peer`` is gone.
        HybridError: the backend refuses the tensor. ``peer`` waits for it in vain, so this rank
            must leave the run.
    """
    try:
        with unrecorded():
            work: dist.Work = call(*arguments)
    except ConnectionLost:
        raise
    except RuntimeError as error:
        raise connection_lost(peer, error) from None
    except Exception as error:  # of any kind: ValueError and TypeError are NCCL's
        sent = [
            f"{t.dtype} of shape {tuple(t.shape)} on {t.device}"
            for t in (arguments[0] if arguments else ())
            if isinstance(t, Tensor)
        ]
        raise HybridError(
            f"The backend has refused a transfer between this rank and {peer}: {error} "
            f"({', '.join(sent)}). This is an error in lightning_hybrid."
        ) from None
    return work


def wait(work: dist.Work, peer: str) -> None:
    """Wait for the end of a transfer or collective that :func:`start` has begun.

    Args:
        work: what :func:`start` has returned.
        peer: name of the other rank (or ranks) in errors.

    Raises:
        ConnectionLost: ``peer`` is gone, or has not answered within the time-out.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise connection_lost(peer, error) from None


def connection_lost(peer: str, error: RuntimeError) -> ConnectionLost:
    """Make the exception to raise when a backend's error means that ``peer`` is lost.

    Its text names ``peer`` and quotes the first line of the backend's message; the rest is mostly
    C++ stack frames.

    Args:
        peer: name of the other rank in the text.
        error: the backend's error.
    """
    reason = str(error).strip().splitlines()[0] if str(error).strip() else "connection closed"
    late = is_late(error)
    why = (
        "It has stopped answering, or needs longer than the time-out, which "
        "the strategy's timeout=... sets; or replicas have different numbers of batches"
        if late
        else "It was killed, or its process ended without a word"
    )
    name = None if peer in _UNKNOWN else peer
    return ConnectionLost(f"Lost {peer}. {why} ({reason})", name, late=late)
