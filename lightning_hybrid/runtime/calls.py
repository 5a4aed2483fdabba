"""What is known of a call of the network: by all ranks of a replica, and by the stages of one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.comm.transport import TensorSpec

Values = list[Tensor]
Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Precision:
    """The precision that surrounds a call of the network on the driver, for the other ranks.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        autocast_dtype: what autocast would use.
        autocast: whether it is enabled.
        default_dtype: of new tensors (``precision="16-true"`` changes it).
    """

    device_type: str
    autocast_dtype: torch.dtype
    autocast: bool
    default_dtype: torch.dtype

    @classmethod
    def current(cls, device: torch.device) -> "Precision":
        """What is in force here."""
        kind = device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return cls(kind, dtype, enabled, torch.get_default_dtype())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, it is in force."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            with torch.autocast(self.device_type, self.autocast_dtype, enabled=self.autocast):
                yield
        finally:
            torch.set_default_dtype(before)


@dataclass(frozen=True)
class CallKey:
    """All that decides what travels in a call: calls with equal keys exchange no shapes.

    Attributes:
        variant: number of the captured graph. Where a value that the network's Python looks at
            has changed, there is a graph of its own, cut at the same places.
        inputs: per micro-batch, what enters stage 0.
        numbers: per micro-batch, what the graph's numbers are (see
            :class:`~lightning_hybrid.network.NetworkGraph`).
        grad: whether the call is differentiable.
        training: whether the network is in training.
        trainable: ``requires_grad`` of every parameter of the network, in its order.
        precision: what surrounds the call.
    """

    variant: int
    inputs: tuple[tuple[TensorSpec, ...], ...]
    numbers: tuple[tuple[int | float, ...], ...]
    grad: bool
    training: bool
    trainable: tuple[bool, ...]
    precision: Precision

    @property
    def microbatches(self) -> int:
        return len(self.inputs)


@dataclass
class Traffic:
    """What one stage has learned from the headers of the first call of a key.

    Attributes:
        incoming: per micro-batch, the values that come from the previous stage.
        outgoing: per micro-batch, the values that go to the next one.
        draws: whether a stage up to this one draws random numbers.
        gradients_in: per pattern of gradients that the driver starts with, which of ``outgoing``
            get a gradient.
        gradients_out: likewise, which of ``incoming`` get one.
    """

    incoming: list[list[TensorSpec]] = field(default_factory=list)
    outgoing: list[list[TensorSpec]] = field(default_factory=list)
    draws: bool = False
    gradients_in: dict[int, list[bool]] = field(default_factory=dict)
    gradients_out: dict[int, list[bool]] = field(default_factory=dict)


@dataclass
class Call:
    """One call of the network on one rank, from its forward to its last backward.

    Attributes:
        number: counts the calls of the network.
        draw: decides the random numbers; see :func:`lightning_hybrid.runtime.random.draw_number`.
        exchange: headers travel with the activations.
        draws: the generators' state travels with the activations.
        traffic: of each stage of this rank.
        saved: of each stage of this rank, per micro-batch, its inputs and outputs, for its
            backward.
    """

    number: int
    draw: int
    key: CallKey
    exchange: bool
    draws: bool
    traffic: list[Traffic]
    saved: list[dict[int, tuple[Values, list[Any]]]]


@dataclass(frozen=True)
class BackwardMode:
    """How a backward pass runs.

    Attributes:
        pattern: number of the pattern of gradients at the network's outputs (some may have none).
        exchange: the pattern is new, headers travel with the gradients.
        parameters: whether parameters get gradients (not under ``torch.autograd.grad``).
        keep: ``retain_graph``.
        input_gradient: whether the driver wants the gradient of the inputs.
        reduce: average over the copies of the stage, overlapped with the last micro-batch.
    """

    pattern: int
    exchange: bool
    parameters: bool
    keep: bool
    input_gradient: bool
    reduce: bool

    def flags(self) -> int:
        """The booleans as the bits of one integer of a frame."""
        bits = (self.exchange, self.parameters, self.keep, self.input_gradient, self.reduce)
        return sum(bit << index for index, bit in enumerate(bits))

    @classmethod
    def of_flags(cls, pattern: int, flags: int) -> "BackwardMode":
        return cls(pattern, *(bool(flags >> index & 1) for index in range(5)))
