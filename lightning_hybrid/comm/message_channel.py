"""Channels that carry the messages of the protocol between two ranks.

They carry commands and answers between a driver and a worker, and words between neighbouring
stages. A message is sent as a frame of integers. Pickled bytes and tensors follow only if the
message has fields that need them: a training step in its steady state pickles nothing.
"""

import pickle
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_hybrid.comm.connections import Transfer, Wire
from lightning_hybrid.comm.protocol import IN_FRAME, MESSAGES, Leaving, Message, StillAlive
from lightning_hybrid.comm.tensor_specs import TensorSpec
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import value_of

_INTEGERS = 9
# one length for all messages, so that a receiver needs not know which one comes
FRAME = _INTEGERS + 2
"""Number of integers in a frame: number of the message's class, one for each of its fields (with
padding), and number of the pickled bytes that follow the frame."""

_NOTHING = (0, 0, 0)
"""Stands before a frame if no small message was kept back to be sent with it
(:meth:`Channel.send_with_next`). Else there stand the number of the small message's class,
counted from 1, and its fields as two integers."""

_TENSORS = "tensors"

_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
"""All types of tensors. A frame holds a type as its index in this list, which is the same on all
ranks."""

_TO_INTEGER: dict[type, Callable[[Any], int]] = {
    int: int,
    bool: int,
    # (the bits of the number)
    float: lambda value: struct.unpack("q", struct.pack("d", value))[0],
    torch.dtype: _DTYPES.index,
}
_FROM_INTEGER: dict[type, Callable[[int], Any]] = {
    int: int,
    bool: bool,
    float: lambda value: struct.unpack("d", struct.pack("q", value))[0],
    torch.dtype: _DTYPES.__getitem__,
}


@dataclass(frozen=True)
class _Layout:
    """How the fields of a class of messages are sent.

    Attributes:
        number: index of the class in ``MESSAGES``.
        integers: names of the fields that are sent as integers in the frame.
        kinds: type of each field in ``integers``.
        pickled: names of the fields that are pickled.
        defaults: default of each of the pickled fields; if all have their default, nothing is
            pickled.
        tensors: whether the message has a field ``tensors``, whose tensors follow.
    """

    number: int
    integers: tuple[str, ...]
    kinds: tuple[type, ...]
    pickled: tuple[str, ...]
    defaults: tuple[Any, ...]
    tensors: bool

    @classmethod
    def of(cls, number: int, kind: type[Message]) -> "_Layout":
        known: Any = kind  # all messages are dataclasses, which the base class does not say
        in_frame: Any = [f for f in fields(known) if kind.in_frame and f.type in IN_FRAME]
        others = [f for f in fields(known) if f not in in_frame and f.name != _TENSORS]
        assert len(in_frame) <= _INTEGERS, kind
        return cls(
            number,
            tuple(f.name for f in in_frame),
            tuple(f.type for f in in_frame),
            tuple(f.name for f in others),
            tuple(f.default for f in others),
            any(f.name == _TENSORS for f in fields(known)),
        )


_LAYOUTS = {kind: _Layout.of(number, kind) for number, kind in enumerate(MESSAGES)}


def encode(message: Message) -> tuple[list[int], bytes, list[Tensor]]:
    """Encode a message as a frame, pickled bytes and tensors, which are sent in this order.

    Deferred tensors get no memory here: the sender makes their numbers later, one by one
    (:func:`ready`). A sparse tensor (for instance a buffer with the graph of a graph network) is
    among the pickled bytes.

    Returns:
        A triple: the frame, `FRAME` integers; the bytes, possibly empty; the dense tensors.
    """
    layout = _LAYOUTS[type(message)]
    values = [
        _TO_INTEGER[kind](getattr(message, name))
        for name, kind in zip(layout.integers, layout.kinds)
    ]
    rest = [getattr(message, name) for name in layout.pickled]
    named = dict(getattr(message, _TENSORS)) if layout.tensors else {}
    data = b""
    # pickling is the slowest part of sending, so it is skipped when all fields have their defaults
    if named or not _are_defaults(rest, layout.defaults):
        specs = {n: _contiguous(t) if _is_dense(t) else t for n, t in named.items()}
        data = pickle.dumps((rest, specs), protocol=5)
    values += [0] * (_INTEGERS - len(values))
    dense = [tensor for tensor in named.values() if _is_dense(tensor)]
    return [layout.number, *values, len(data)], data, dense


def _contiguous(tensor: Tensor) -> TensorSpec:
    # without strides: the receiver copies the numbers into a tensor that has its own
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _are_defaults(values: Sequence[Any], defaults: Sequence[Any]) -> bool:
    for value, default in zip(values, defaults):
        # by identity, since comparing tensors or lists by value may cost more than sending them
        if default is MISSING or value is not default:
            return False
    return True


Specs = dict[str, TensorSpec | Tensor]
"""By name of each tensor of a message: its spec, if it follows the message; a sparse tensor
itself."""


def decode(frame: Sequence[int], data: bytes) -> tuple[type[Message], dict[str, Any], Specs]:
    """Decode a frame and the pickled bytes that :func:`encode` has made.

    Returns:
        A triple: the class of the message; its fields by name, without ``tensors`` (a field that is
        missing has its default); the specs of its tensors.
    """
    kind = MESSAGES[frame[0]]
    layout = _LAYOUTS[kind]
    values: dict[str, Any] = {
        name: _FROM_INTEGER[kind_of](value)
        for name, kind_of, value in zip(layout.integers, layout.kinds, frame[1:])
    }
    if not data:
        return kind, values, {}  # the other fields have their defaults
    rest, specs = pickle.loads(data)
    values |= zip(layout.pickled, rest)
    return kind, values, specs


def ready(tensor: Tensor) -> Tensor:
    """Make a tensor ready to be sent: contiguous, on the CPU, detached; a copy if it is not so yet.

    The numbers of a deferred tensor are made for that, in new memory.
    """
    value = value_of(tensor).cpu()
    return _contiguous(value).laid_out(value)


# Sent tensors are kept until the peer has received them; with more than this the sender waits.
_KEPT_SENDS, _KEPT_BYTES = 64, 2**26

T = TypeVar("T", bound=Message)


class Channel:
    """Sends messages to one peer and receives messages from it, in order.

    Only one thread may send and receive; another one may call :meth:`send_still_alive` meanwhile.

    Args:
        wire: wire to the peer, which nothing else uses.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._sends: deque[tuple[Transfer, Tensor]] = deque()
        self._kept_bytes = 0
        self._lock = threading.RLock()  # a heartbeat must not be sent in the middle of a message
        self._beat = torch.tensor([*_NOTHING, *encode(StillAlive())[0]])
        self._beats: list[Transfer] = []
        self._left: Failure | None = None
        self._rest: Iterator[tuple[str, Tensor]] = iter(())
        self._waiting = _NOTHING  # the small message that was kept back
        self._behind: list[int] = []  # a frame that was received with a small message before it

    @property
    def peer(self) -> str:
        """Name of the other rank in errors."""
        return self._wire.peer

    def send(self, message: Message, *, last: bool = False) -> None:
        """Send a message. Waits only while the peer has not received much of what was sent before.

        Args:
            message: the message.
            last: whether it is the last message. Then this does not wait: a peer that has failed
                too would never receive what was sent before.

        Raises:
            ConnectionLost: the peer is gone.
            Exception: a tensor cannot be made ready; zeros were sent in its place.
        """
        tensors = _tensors_of(message, self._waiting)
        self._waiting = _NOTHING
        with self._lock:
            for tensor in tensors:
                self._begin(tensor)
                while not last and self._keeps_much():
                    self._wait_for_oldest()

    def send_with_next(self, message: Message) -> None:
        """Keep a small message back, and send it in one transfer with the next one.

        If a message is kept back already, both are sent now. For messages whose effect nobody waits
        for (``Command.goes_with_next``).

        Args:
            message: a message without pickled fields and tensors, and with at most two other
                fields.
        """
        if self._waiting != _NOTHING:
            self.send(message)
            return
        (number, one, other, *rest), _, _ = encode(message)
        assert not any(rest), message  # (the last is the length of what is pickled)
        self._waiting = number + 1, one, other

    def send_still_alive(self) -> None:
        """Tell the peer that this rank is busy, without waiting; may be called from any thread.

        The peer's :meth:`receive` skips this message, and waits for the next one with a new
        time-out.
        """
        with self._lock:
            # Nobody waits for the transfer, since the peer possibly receives much later; but it is
            # kept, since a transfer that is dropped is not sent.
            self._beats.append(self._wire.send(self._beat))

    def receive(self, kind: type[T]) -> T:
        """Wait for the next message, and return it. Messages of heartbeats are skipped.

        Its tensors are received when they are iterated over, which must be done before the next
        call; tensors that are left then are dropped.

        Args:
            kind: class that the message must have.

        Raises:
            ConnectionLost: the peer is gone, or has not answered within the time-out.
            HybridError: the message is of another class.
            Exception: the failure with which the peer has left; see :class:`Leaving`.
        """
        if self._left is not None:
            raise self._left.exception()
        for _ in self._rest:  # receive tensors that the caller has left, as after an error
            pass
        received, values, specs = self._receive_parts()
        while received is StillAlive:
            received, values, specs = self._receive_parts()
        self._rest = self._receive_tensors(specs)
        if _LAYOUTS[received].tensors:
            values[_TENSORS] = self._rest
        message = received(**values)
        if isinstance(message, Leaving):
            self._left = message.failure
            raise self._left.exception()
        if not isinstance(message, kind):
            raise HybridError(
                f"Expected {kind.__name__} from {self.peer}, and received "
                f"{type(message).__name__}: the ranks disagree on what comes next. This is an "
                "error in lightning_hybrid."
            )
        return message

    def flush(self) -> None:
        """Wait until all transfers that this rank has begun have ended.

        A message that :meth:`send_with_next` keeps back stays.

        Raises:
            ConnectionLost: the peer is gone, or has not answered within the time-out.
        """
        while self._sends:
            self._wait_for_oldest()

    def _begin(self, tensor: Tensor) -> None:
        self._sends.append((self._wire.send(tensor), tensor))
        self._kept_bytes += tensor.nbytes

    def _keeps_much(self) -> bool:
        return len(self._sends) > _KEPT_SENDS or self._kept_bytes > _KEPT_BYTES

    def _wait_for_oldest(self) -> None:
        transfer, tensor = self._sends.popleft()
        self._kept_bytes -= tensor.nbytes
        transfer.wait()

    def _receive_parts(self) -> tuple[type[Message], dict[str, Any], Specs]:
        frame, self._behind = self._behind, []
        if not frame:
            length = len(_NOTHING) + FRAME
            integers = self._receive(torch.empty(length, dtype=torch.int64)).tolist()
            (before, *fields), frame = integers[: len(_NOTHING)], integers[len(_NOTHING) :]
            if before:
                self._behind = frame
                return decode([before - 1, *fields], b"")
        data = b""
        if frame[-1]:
            data = self._receive(torch.empty(frame[-1], dtype=torch.uint8)).numpy().tobytes()
        return decode(frame, data)

    def _receive_tensors(self, specs: Specs) -> Iterator[tuple[str, Tensor]]:
        for name, spec in specs.items():
            if isinstance(spec, Tensor):
                yield name, spec
                continue
            tensor = spec.empty_in_own_memory()
            yield name, self._receive(tensor) if tensor.numel() else tensor

    def _receive(self, tensor: Tensor) -> Tensor:
        self._wire.receive(tensor).wait()
        return tensor


def _tensors_of(message: Message, before: tuple[int, int, int]) -> Iterator[Tensor]:
    """The tensors to send for a message, in order: frame, pickled bytes, then its own tensors.

    The message's own tensors are made ready one by one, when the result is iterated over.

    Args:
        message: the message.
        before: the integers that stand before its frame; see `_NOTHING`.
    """
    frame, data, tensors = encode(message)
    head = [torch.tensor([*before, *frame])]
    if data:
        # a copy, since torch wants writable memory and bytes are not
        head.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return chain(head, _made_ready(tensors))


def _made_ready(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Make the tensors of a message ready one by one; in the place of one that fails, yield zeros.

    The peer knows from the frame how many tensors come, and would take the next message for a
    missing one. Empty tensors are left out, as the peer knows, too.

    Raises:
        Exception: after the last tensor: the first error that making one ready has raised.
    """
    failure: Exception | None = None
    for tensor in tensors:
        if not tensor.numel():
            continue
        try:
            travels = ready(tensor)
        except Exception as error:
            failure = failure or error
            travels = torch.zeros(tensor.shape, dtype=tensor.dtype)
        yield travels
    if failure is not None:
        raise failure
