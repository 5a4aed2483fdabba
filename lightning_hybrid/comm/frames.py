"""Messages as they travel: a frame of integers, and behind it what does not fit into one."""

import pickle
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.comm.messages import Message, Tensors
from lightning_hybrid.comm.protocol import MESSAGES
from lightning_hybrid.comm.tensor_specs import TensorSpec
from lightning_hybrid.tensors import value_of

_INTEGERS = 8
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
