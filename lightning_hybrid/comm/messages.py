"""What one rank sends to another, beside the commands of a driver.

Those are in :mod:`lightning_hybrid.comm.protocol`.

* An :class:`Answer` goes from a worker to its driver.
* A :class:`Word` goes from a stage to the one before or behind it, on the queue of their link.
* :class:`StillAlive` and :class:`Leaving` may come between all others and are dealt with by the
  channel itself.

Messages with ``in_frame`` are part of every training step: their integers travel in a frame of
fixed size. All other fields are pickled together, and only where one of them differs from its
default. A field ``tensors`` is neither: specs are pickled, then the tensors follow as they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.tensor_specs import TensorSpec

Tensors = Iterable[tuple[str, Tensor]]
"""Named tensors. The receiver gets an iterator that takes them off the wire one by one."""


class Message:
    """What one rank sends to another.

    Attributes:
        in_frame: whether the integers of the message travel in its frame (at most eight).
    """

    in_frame: ClassVar[bool] = False


@dataclass(frozen=True)
class Answer(Message):
    """To a command, by a worker.

    Attributes:
        failure: what the worker has failed with, now or since it was last asked.
        value: what was asked for.
        tensors: likewise, as tensors.
    """

    failure: Failure | None = None
    value: Any = None
    tensors: Tensors = ()


class Word(Message):
    """What a stage tells one beside it."""


@dataclass(frozen=True)
class Header(Word):
    """What follows: the values of a micro-batch; ``None`` once, and nothing, if a stage has failed.

    Attributes:
        specs: of the values.
        uses_rng: whether a stage up to here draws random numbers.
    """

    specs: list[TensorSpec] | None = None
    uses_rng: bool = False


@dataclass(frozen=True)
class Status(Word):
    """At the end of a forward pass: whether a stage up to here has failed.

    Attributes:
        failure: that of the stage; ``None``: none has failed.
    """

    failure: Failure | None = None


@dataclass(frozen=True)
class Pattern(Word):
    """Which of the values of a cut get a gradient.

    Attributes:
        present: per value of the cut, whether it gets one.
    """

    present: list[bool]


@dataclass(frozen=True)
class StillAlive(Message):
    """The sender is busy, and has not stopped."""


@dataclass(frozen=True)
class Leaving(Message):
    """The sender has failed, or heard of a failure: nothing comes from it any more."""

    failure: Failure
