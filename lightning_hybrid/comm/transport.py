"""Tensors and commands between two ranks.

Two kinds of traffic, on groups of their own (:mod:`lightning_hybrid.comm.mesh`):

* a :class:`Link` moves the tensors of one direction of one edge. Sends do not block; receives are
  posted ahead. Shapes are known on both sides, so nothing but the numbers travels.
* the :class:`Control` link moves *frames*: eight integers, and pickled bytes behind them only
  where a command needs more (a plan, a new shape, an error). A training step in its steady state
  pickles nothing.
"""

import pickle
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.losses import is_late
from lightning_hybrid.comm.mesh import Group
from lightning_hybrid.compat import unrecorded
from lightning_hybrid.errors import RemoteError
from lightning_hybrid.network.deferred import value_of

FRAME = 8
"""Integers in a frame: operation, six arguments, number of pickled bytes behind it."""

# Sends whose buffers must live until they have left. Older ones have: the peer has answered since.
_KEPT_SENDS, _KEPT_BYTES = 64, 2**26


_SOMEBODY = "a rank of"
_A_RANK = f"{_SOMEBODY} the group"
_STILL_HERE, _LEAVING = -1, -2  # frames between all others


class ConnectionLost(RemoteError):
    """A peer went away without a word, or does not answer.

    Args:
        text: what to say.
        peer: the name of the peer, if this rank can tell which it is.
        late: it did not answer within the time-out; its process may be there.
    """

    def __init__(self, text: str, peer: str | None = None, *, late: bool = False) -> None:
        super().__init__(text)
        self.peer, self.late = peer, late


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


class Arrival:
    """Tensors on their way: ``wait`` returns them when they are here."""

    def __init__(self, tensors: list[Tensor], works: list[dist.Work], peer: str) -> None:
        self._tensors, self._works, self._peer = tensors, works, peer

    def wait(self) -> list[Tensor]:
        for work in self._works:
            wait(work, self._peer)
        return self._tensors


class Link:
    """One direction between two ranks.

    Args:
        group: a group of these two ranks alone.
        me: this rank's index in the group; the other's is ``1 - me``.
        peer: how to name the other rank in an error.
        device: where received tensors live.
    """

    def __init__(self, group: Group, me: int, peer: str, device: torch.device) -> None:
        self._group, self._other, self._peer, self._device = group, 1 - me, peer, device
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send without waiting; the tensors must not be changed before :meth:`flush`."""
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            work = start(self._group.send, [tensor], self._other, 0, peer=self._peer)
            self._sends.append((work, tensor))

    def post(self, specs: Sequence[TensorSpec]) -> Arrival:
        """Get ready to receive tensors of these shapes, in this order."""
        tensors = [spec.empty(self._device) for spec in specs]
        works = [
            start(self._group.recv, [tensor], self._other, 0, peer=self._peer) for tensor in tensors
        ]
        return Arrival(tensors, works, self._peer)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        while self._sends:
            work, _ = self._sends.popleft()
            wait(work, self._peer)


class Control:
    """Frames and objects between the ranks of one replica (or any small gloo group).

    Args:
        group: a gloo group.
        names: how to name its ranks in an error, by their index in the group.
    """

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        self._group, self._names = group, tuple(names)
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._lock = threading.RLock()  # a heartbeat stands between messages, never inside of one
        self._beat = torch.zeros(FRAME, dtype=torch.int64)
        self._beat[0] = _STILL_HERE
        self._beats: list[dist.Work] = []
        self._left: dict[int, Failure] = {}

    def tell(self, peer: int, operation: int, *arguments: int, payload: Any = None) -> None:
        """Send a frame, and ``payload`` pickled behind it, without waiting."""
        data = b"" if payload is None else pickle.dumps(payload, protocol=5)
        padding = (0,) * (FRAME - 2 - len(arguments))
        frame = torch.tensor((operation, *arguments, *padding, len(data)))
        with self._lock:
            self._send(peer, frame)
            if data:
                self._send(peer, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def say_still_here(self, peer: int) -> None:
        """From any thread: send a frame that :meth:`hear` passes over."""
        with self._lock:
            work = start(self._group.send, [self._beat], peer, 0, peer=self._names[peer])
        # Nobody waits for it: the peer may not listen for long. Until it does gloo has promised it
        # this message, so none is dropped; and there is no way to ask whether one has left.
        self._beats.append(work)

    def hear(self, peer: int) -> tuple[int, list[int], Any]:
        """Wait for a frame.

        Returns:
            Operation, six arguments, payload.

        Raises:
            ConnectionLost: the peer went away without a word.
            Exception: the peer has left because of this; see :meth:`say_goodbye`.
        """
        if peer in self._left:
            raise self._left[peer].exception()
        operation = _STILL_HERE
        frame = torch.empty(FRAME, dtype=torch.int64)
        while operation == _STILL_HERE:
            self._receive(peer, frame)
            operation, *arguments, size = frame.tolist()
        payload: Any = None
        if size:
            data = torch.empty(size, dtype=torch.uint8)
            self._receive(peer, data)
            payload = pickle.loads(data.numpy().tobytes())
        if operation == _LEAVING:
            self._left[peer] = payload
            raise payload.exception()
        return operation, arguments, payload

    def send_tensors(self, peer: int, tensors: dict[str, Tensor]) -> None:
        """Send named tensors; those on a device go by way of the CPU."""
        with self._lock:
            self.tell(peer, 0, payload={name: TensorSpec.of(t) for name, t in tensors.items()})
            for tensor in tensors.values():
                if tensor.numel():
                    self._send(peer, value_of(tensor).cpu().contiguous())

    def receive_tensors(self, peer: int) -> dict[str, Tensor]:
        """The other end of :meth:`send_tensors`."""
        return dict(self.receive_each(peer))

    def receive_each(self, peer: int) -> Iterator[tuple[str, Tensor]]:
        """Likewise, one by one: who takes none for long never has all of them."""
        _, _, specs = self.hear(peer)
        for name, spec in (specs or {}).items():
            tensor = spec.empty(torch.device("cpu"))
            if tensor.numel():
                self._receive(peer, tensor)
            yield name, tensor

    def say_goodbye(self, failure: Failure) -> None:
        """This rank leaves because of ``failure``: others that wait for it raise that instead."""
        for peer in range(len(self._names)):
            if peer != self._group.rank():
                with suppress(ConnectionLost):
                    self.tell(peer, _LEAVING, payload=failure)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        while self._sends:
            work, _ = self._sends.popleft()
            wait(work, _A_RANK)

    def _send(self, peer: int, tensor: Tensor) -> None:
        work = start(self._group.send, [tensor], peer, 0, peer=self._names[peer])
        self._sends.append((work, tensor))
        while len(self._sends) > _KEPT_SENDS or self._kept_bytes() > _KEPT_BYTES:
            oldest, _ = self._sends.popleft()
            wait(oldest, self._names[peer])

    def _kept_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._sends)

    def _receive(self, peer: int, tensor: Tensor) -> None:
        name = self._names[peer]
        wait(start(self._group.recv, [tensor], peer, 0, peer=name), name)


def broadcast_object(
    group: Group, value: Any, source: int = 0, device: torch.device | None = None
) -> Any:
    """Give every rank of ``group`` the object of the rank with index ``source``.

    Args:
        group: of gloo; of another backend with the ``device`` that it works on.
        value: the object; of no interest on the other ranks.
        source: index of the rank that has it.
        device: where the group's tensors live, by default the CPU.
    """
    if group.size() == 1:
        return value
    here = group.rank() == source
    data = pickle.dumps(value, protocol=5) if here else b""
    size = torch.tensor([len(data)], device=device)
    options = dist.BroadcastOptions()
    options.rootRank = source
    wait(start(group.broadcast, [size], options, peer=_A_RANK), _A_RANK)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if here else None
    if buffer is None:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    buffer = buffer.to(device or buffer.device)
    wait(start(group.broadcast, [buffer], options, peer=_A_RANK), _A_RANK)
    return value if here else pickle.loads(buffer.cpu().numpy().tobytes())


def gather_objects(group: Group, value: Any) -> list[Any]:
    """The objects of all ranks of a gloo ``group``, on every one of them."""
    return [broadcast_object(group, value, source) for source in range(group.size())]


def meet(group: Group, *, failed: bool = False) -> bool:
    """Wait until every rank of ``group`` is here, and hear whether all are well."""
    flag, work = _come(group, failed=failed)
    wait(work, _A_RANK)
    return not flag.item()


def say_at_next_meeting(group: Group, patience: timedelta) -> None:
    """A rank that has failed comes to the next meeting all the same, to say so.

    Who comes after it has run out of ``patience`` still hears it, as long as its process lives.
    """
    with suppress(ConnectionLost, RuntimeError):
        _come(group, failed=True)[1].wait(patience)


def _come(group: Group, *, failed: bool) -> tuple[Tensor, dist.Work]:
    flag = torch.tensor([int(failed)])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return flag, start(group.allreduce, [flag], options, peer=_A_RANK)


def start(call: Any, *arguments: Any, peer: str) -> dist.Work:
    """Begin a transfer: ``call`` is a method of a process group.

    Raises:
        ConnectionLost: ``peer`` has gone away before.
    """
    try:
        with unrecorded():
            work: dist.Work = call(*arguments)
    except RuntimeError as error:
        raise _lost(peer, error) from None
    return work


def wait(work: dist.Work, peer: str) -> None:
    """Wait for a transfer.

    Raises:
        ConnectionLost: ``peer`` went away.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(peer, error) from None


def _lost(peer: str, error: RuntimeError) -> ConnectionLost:
    """Say whom this rank has lost; gloo's own text is a page of C++ frames behind one line."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else "connection closed"
    late = is_late(error)
    why = (
        "It has stopped answering, or needs longer than the time-out, which "
        "HybridGabraStrategy(timeout=...) sets"
        if late
        else "It was killed, or its process ended without a word"
    )
    name = None if peer.startswith(_SOMEBODY) else peer
    return ConnectionLost(f"Lost {peer}. {why} ({reason})", name, late=late)
