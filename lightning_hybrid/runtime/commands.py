"""What a driver can ask of its workers: the operations of a frame and what goes with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, unique

from lightning_hybrid.network import StageCode


@unique
class Op(IntEnum):
    """The first number of a frame; behind it stand up to six arguments (in brackets)."""

    CUT = 1
    """Make the stages of a network or of a variant of it; a :class:`Cut` follows. Answered."""
    TAKE_OPTIMIZERS = 2
    """[fresh] Take optimizers as the driver's are now; keep known state of those whose bit is 0."""
    FORWARD = 3
    """[network, call, draw, key, exchange, draws] A new key is followed by its :class:`CallKey`."""
    BACKWARD = 4
    """[network, call, pattern, flags] See :class:`BackwardMode`."""
    FREE = 5
    """[network, call] This call gets no backward."""
    REDUCE = 6
    """[network] Average the gradients over the copies of the stage."""
    ZERO_GRAD = 7
    """[optimizer, set_to_none]"""
    STEP = 8
    """[optimizer] Parameter groups follow where they have changed."""
    GRADIENT_NORM = 9
    """[optimizer] A norm's order follows. Answered with the norm of this rank's gradients."""
    SCALE_GRADIENTS = 10
    """[optimizer] A factor follows."""
    CLIP_VALUES = 11
    """[optimizer] A bound follows."""
    BUFFERS = 12
    """[state] Give every copy of the stage the buffers of replica 0, or only its state."""
    GIVE_WEIGHTS = 13
    """Answer with weights and buffers, as tensors: those named, or all of the stages."""
    TAKE_WEIGHTS = 14
    """Weights follow, of the stages or of the whole module."""
    GIVE_OPTIMIZER = 15
    """[optimizer] Answered with its state by parameter name."""
    END = 16
    """The run is over: :class:`Results` follow. Answered."""
    ABORT = 17
    """The driver has failed: the text of its error follows."""
    NAME_GRADIENTS = 18
    """Answered with the names of the parameters that have a gradient."""
    GIVE_GRADIENTS = 19
    """Answer with the gradients of the parameters named, as tensors."""
    TAKE_GRADIENTS = 20
    """[add] Gradients follow, to be set or added."""
    CLEAR_GRADIENTS = 21
    """Set the gradients of the parameters named to ``None``."""
    GIVE_BORROWED = 26
    """Answer with the gradients of borrowed parameters, as tensors, and forget them here."""
    TAKE_GROUPS = 22
    """[optimizer] Its parameter groups follow."""
    UNSCALE = 23
    """[optimizer] A factor follows. Answered with whether a gradient is not finite."""
    CHECK = 24
    """Answered with word that all went well up to here."""
    REPORT = 25
    """The name of a report follows. Answered with what this rank has to say."""
    FORGET_FAILURE = 28
    """The run ends, and what follows is wanted whatever has failed before."""
    SHARE = 27
    """[network, optimizers] Give every copy of the stage the weights of replica 0; on request the
    state of the optimizers too."""


@dataclass(frozen=True)
class Cut:
    """A rank's stages of a network.

    Attributes:
        network: number of the network; one that is known gets another graph.
        name: its dotted name in the LightningModule; empty for the LightningModule itself.
        stages: the rank's stages, by number.
        devices: of each stage of the network the position of its rank in the replica.
        borrowed: names in the network of parameters that the rank uses and another one owns.
        schedule: name of the schedule.
        seed: of the random numbers inside the network.
    """

    network: int
    name: str
    stages: Mapping[int, StageCode]
    devices: tuple[int, ...]
    borrowed: frozenset[str]
    schedule: str
    seed: int
