"""Messages between two ranks: commands and answers of a driver and a worker, words of neighbours.

A message is a frame of integers, and pickled bytes and tensors behind it only where it needs them:
a training step in its steady state pickles nothing (:mod:`lightning_hybrid.comm.frames`).
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.frames import FRAME, Parts, decode, encode, ready
from lightning_hybrid.comm.messages import Leaving, Message, StillAlive
from lightning_hybrid.comm.tensor_specs import TensorSpec
from lightning_hybrid.comm.transport import Transfer, Wire
from lightning_hybrid.errors import HybridError

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
