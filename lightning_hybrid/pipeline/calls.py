"""What the stages of one rank know of a call of the network."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_hybrid.comm import CallKey, TensorSpec

Values = list[Tensor]
Gradients = list[Tensor | None]


@dataclass
class Traffic:
    """What one stage has learned from the headers of the first call of a key.

    Attributes:
        incoming: per micro-batch, the values that come from the previous stage.
        outgoing: per micro-batch, the values that go to the next one.
        uses_rng: whether a stage up to this one draws random numbers.
        gradients_in: per pattern of gradients that the driver starts with, which of ``outgoing``
            get a gradient.
        gradients_out: likewise, which of ``incoming`` get one.
    """

    incoming: list[list[TensorSpec]] = field(default_factory=list)
    outgoing: list[list[TensorSpec]] = field(default_factory=list)
    uses_rng: bool = False
    gradients_in: dict[int, list[bool]] = field(default_factory=dict)
    gradients_out: dict[int, list[bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """What it takes to run the forward of a micro-batch again.

    Attributes:
        values: its inputs.
        states: of the generators before it; empty if it draws no random numbers.
        buffers: by name, those that it writes as they were before it.
    """

    values: Values
    states: Values
    buffers: dict[str, Tensor]


@dataclass
class Call:
    """One call of the network on one rank, from its forward to its last backward.

    Attributes:
        number: counts the calls of the network.
        draw: decides the random numbers; see
            :func:`lightning_hybrid.pipeline.random_numbers.draw_number`.
        key: decides what travels; calls with equal keys exchange no shapes.
        exchange: headers travel with the activations.
        uses_rng: the generators' state travels with the activations.
        traffic: of each stage of this rank.
        saved: of each stage of this rank, per micro-batch, its inputs and outputs, for its
            backward.
        states: of the generators behind the last stage, where that one is here and they travel.
        ahead: it runs before its turn on all stages but the last; see
            :mod:`lightning_hybrid.pipeline.early_forwards`.
    """

    number: int
    draw: int
    key: CallKey
    exchange: bool
    uses_rng: bool
    traffic: list[Traffic]
    saved: list[dict[int, tuple[Values, list[Any]] | Recipe]]
    states: Values = field(default_factory=list)
    ahead: bool = False
