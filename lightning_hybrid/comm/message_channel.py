"""Messages between two ranks: commands and answers of a driver and a worker, words of neighbours.

A message travels as a frame of integers. Pickled bytes and tensors follow it only where it needs
them: a training step in its steady state pickles nothing.
"""

import pickle
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_hybrid.comm.connections import Transfer, Wire
from lightning_hybrid.comm.protocol import MESSAGES, Leaving, Message, StillAlive, Tensors
from lightning_hybrid.comm.tensor_specs import TensorSpec
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote import value_of

_INTEGERS = 8
# one length for all kinds, so that a receiver needs to know nothing of what comes
FRAME = _INTEGERS + 2
"""Integers in a frame: number of the message, its own, number of pickled bytes behind the frame."""

_TENSORS = "tensors"


@dataclass(frozen=True)
class _Layout:
    """Where the fields of a message travel.

    Attributes:
        number: of the message.
        integers: names of the fields in the frame.
        kinds: of each of them whether it is an ``int`` or a ``bool``.
        pickled: names of the other fields.
        defaults: theirs; nothing is pickled where they hold.
        tensors: whether tensors follow.
    """

    number: int
    integers: tuple[str, ...]
    kinds: tuple[type, ...]
    pickled: tuple[str, ...]
    defaults: tuple[Any, ...]
    tensors: bool

    @classmethod
    def of(cls, number: int, kind: type[Message]) -> "_Layout":
        known: Any = kind  # of the protocol: a dataclass
        in_frame = [f for f in fields(known) if kind.in_frame and f.type in (int, bool)]
        others = [f for f in fields(known) if f not in in_frame and f.name != _TENSORS]
        assert len(in_frame) <= _INTEGERS, kind
        return cls(
            number,
            tuple(f.name for f in in_frame),
            tuple(bool if f.type is bool else int for f in in_frame),
            tuple(f.name for f in others),
            tuple(f.default for f in others),
            any(f.name == _TENSORS for f in fields(known)),
        )


_LAYOUTS = {kind: _Layout.of(number, kind) for number, kind in enumerate(MESSAGES)}


def encode(message: Message) -> tuple[list[int], bytes, list[Tensor]]:
    """A message as a frame, the pickled bytes behind it, and the tensors behind those.

    Tensors whose memory is not here yet stay as they are: the sender makes them one by one. A
    sparse one (the graph of a graph network is a buffer) is among the pickled bytes, whole.
    """
    layout = _LAYOUTS[type(message)]
    values = [int(getattr(message, name)) for name in layout.integers]
    rest = [getattr(message, name) for name in layout.pickled]
    named = dict(getattr(message, _TENSORS)) if layout.tensors else {}
    data = b""
    # pickling takes longer than all else in a message: a step in its steady state has none
    if named or not _are_defaults(rest, layout.defaults):
        specs = {n: _contiguous(t) if _is_dense(t) else t for n, t in named.items()}
        data = pickle.dumps((rest, specs), protocol=5)
    values += [0] * (_INTEGERS - len(values))
    dense = [tensor for tensor in named.values() if _is_dense(tensor)]
    return [layout.number, *values, len(data)], data, dense


def _contiguous(tensor: Tensor) -> TensorSpec:
    # they are copied into tensors that have an order in memory already
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _are_defaults(values: Sequence[Any], defaults: Sequence[Any]) -> bool:
    for value, default in zip(values, defaults):
        # by identity: to compare tensors or lists may cost more than to send them
        if default is MISSING or value is not default:
            return False
    return True


@dataclass(slots=True)
class Parts:
    """A message that has arrived, but for its tensors.

    Attributes:
        kind: its class.
        values: its fields.
        specs: of its tensors; a sparse one itself.
    """

    kind: type[Message]
    values: dict[str, Any]
    specs: dict[str, TensorSpec | Tensor]

    def message(self, tensors: Tensors) -> Message:
        """The message; ``tensors`` takes the tensors off the wire."""
        if _LAYOUTS[self.kind].tensors:
            return self.kind(**self.values, **{_TENSORS: tensors})
        return self.kind(**self.values)


def decode(frame: Sequence[int], data: bytes) -> Parts:
    """The other end of :func:`encode`."""
    kind = MESSAGES[frame[0]]
    layout = _LAYOUTS[kind]
    values: dict[str, Any] = {
        name: kind_of(value)
        for name, kind_of, value in zip(layout.integers, layout.kinds, frame[1:])
    }
    if not data:
        return Parts(kind, values, {})  # the other fields have their defaults
    rest, specs = pickle.loads(data)
    values |= zip(layout.pickled, rest)
    return Parts(kind, values, specs)


def ready(tensor: Tensor) -> Tensor:
    """A tensor as it travels: with its numbers, contiguous, on the CPU."""
    value = value_of(tensor).cpu()
    return _contiguous(value).laid_out(value)


# What has been sent must live until the peer has taken it. Beyond this much the sender waits.
_KEPT_SENDS, _KEPT_BYTES = 64, 2**26

T = TypeVar("T", bound=Message)


class Channel:
    """Messages to one peer and from it, in order.

    One thread sends and receives; another one may send :class:`StillAlive` in between.

    Args:
        wire: leads to the peer; nobody else uses it.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._sends: deque[tuple[Transfer, Tensor]] = deque()
        self._kept_bytes = 0
        self._lock = threading.RLock()  # a heartbeat stands between messages, never inside of one
        self._beat = torch.tensor(encode(StillAlive())[0])
        self._beats: list[Transfer] = []
        self._left: Failure | None = None
        self._rest: Iterator[tuple[str, Tensor]] = iter(())

    @property
    def peer(self) -> str:
        """How to name the other rank in an error."""
        return self._wire.peer

    def send(self, message: Message) -> None:
        """Send a message. Does not wait for the peer, unless it has left much untaken.

        Raises:
            ConnectionLost: the peer is gone.
            Exception: a tensor cannot be made ready; the peer has taken zeros for it.
        """
        tensors = _tensors_of(message)
        with self._lock:
            for tensor in tensors:
                self._begin(tensor)
                while len(self._sends) > _KEPT_SENDS or self._kept_bytes > _KEPT_BYTES:
                    self._wait_for_oldest()

    def send_last(self, message: Message) -> None:
        """Send a message after which none follows. Does not wait for the peer in any case.

        Raises:
            ConnectionLost: the peer is gone.
        """
        tensors = _tensors_of(message)
        # a peer that has failed too takes nothing: to wait for it would be for ever
        with self._lock:
            for tensor in tensors:
                self._begin(tensor)

    def send_still_alive(self) -> None:
        """From any thread: tell the peer that this rank is busy; :meth:`receive` passes over it."""
        with self._lock:
            # Nobody waits for the transfer: the peer may not receive for long. Until it does, it
            # has been promised this message, so it must not be dropped.
            self._beats.append(self._wire.send(self._beat))

    def receive(self, kind: type[T]) -> T:
        """Wait for the next message. Its tensors, if any, are to be taken before the next call.

        Args:
            kind: what it must be.

        Raises:
            ConnectionLost: the peer is gone, or late.
            HybridError: it is something else.
            Exception: the peer has left because of this; see :class:`Leaving`.
        """
        if self._left is not None:
            raise self._left.exception()
        for _ in self._rest:  # nobody has taken them, as after an error
            pass
        parts = self._receive_parts()
        while parts.kind is StillAlive:
            parts = self._receive_parts()
        self._rest = self._receive_tensors(parts.specs)
        message = parts.message(self._rest)
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
        """Wait until the peer has taken everything sent.

        Raises:
            ConnectionLost: the peer is gone, or late.
        """
        while self._sends:
            self._wait_for_oldest()

    def _begin(self, tensor: Tensor) -> None:
        self._sends.append((self._wire.send(tensor), tensor))
        self._kept_bytes += tensor.nbytes

    def _wait_for_oldest(self) -> None:
        transfer, tensor = self._sends.popleft()
        self._kept_bytes -= tensor.nbytes
        transfer.wait()

    def _receive_parts(self) -> Parts:
        frame = self._receive(torch.empty(FRAME, dtype=torch.int64)).tolist()
        data = b""
        if frame[-1]:
            data = self._receive(torch.empty(frame[-1], dtype=torch.uint8)).numpy().tobytes()
        return decode(frame, data)

    def _receive_tensors(
        self, specs: dict[str, TensorSpec | Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, spec in specs.items():
            if isinstance(spec, Tensor):
                yield name, spec
                continue
            tensor = spec.empty(torch.device("cpu"))
            yield name, self._receive(tensor) if tensor.numel() else tensor

    def _receive(self, tensor: Tensor) -> Tensor:
        self._wire.receive(tensor).wait()
        return tensor


def _tensors_of(message: Message) -> Iterator[Tensor]:
    """What travels for a message, in order. Its tensors are made ready one by one."""
    frame, data, tensors = encode(message)
    head = [torch.tensor(frame)]
    if data:
        # torch wants memory that may be written to, which bytes are not
        head.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return chain(head, _made_ready(tensors))


def _made_ready(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """As many as the head has promised: after an error zeros, and then the error.

    The peer would take the next message for the missing bytes, and never hear of the error.
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
