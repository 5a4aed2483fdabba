"""What is known of a call of the network: by all ranks of a replica, and by one stage."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_hybrid.runtime.transport import TensorSpec

Values = list[Tensor]
Gradients = list[Tensor | None]


@dataclass(frozen=True)
class CallKey:
    """All that decides what travels in a call: calls with equal keys exchange no shapes.

    Attributes:
        variant: number of the traced graph. A call with other sizes (another crop), other
            arguments that are no tensors, or in a mode that changes the layers, has a graph of
            its own, cut at the same places.
        inputs: per micro-batch, what enters stage 0.
        grad: whether the call is differentiable.
        training: the training flag of every module of the network, in its order of modules.
        trainable: ``requires_grad`` of every parameter of the network, in its order.
        autocast: device type, dtype, and whether it is enabled.
        default_dtype: of new tensors inside the network (``precision="16-true"`` changes it).
    """

    variant: int
    inputs: tuple[tuple[TensorSpec, ...], ...]
    grad: bool
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    autocast: tuple[str, torch.dtype, bool]
    default_dtype: torch.dtype

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
    """One call of the network on one stage, from its forward to its last backward.

    Attributes:
        number: counts the calls of the network.
        draw: decides the random numbers; see :func:`lightning_hybrid.runtime.random.draw_number`.
        exchange: headers travel with the activations.
        draws: the generators' state travels with the activations.
        saved: per micro-batch, the stage's inputs and outputs, for its backward.
    """

    number: int
    draw: int
    key: CallKey
    traffic: Traffic
    exchange: bool
    draws: bool
    saved: dict[int, tuple[Values, Values]] = field(default_factory=dict)


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
