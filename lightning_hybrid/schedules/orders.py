"""What each stage computes, in order: what streamed schedules do between barriers.

An order knows no messages: a forward needs the one before it along the chain, a backward the one
after it. `planning.order_times` times it.
"""

from enum import StrEnum
from typing import NamedTuple


class Part(StrEnum):
    """What is computed."""

    FORWARD = "F"
    BACKWARD = "B"


class Work(NamedTuple):
    """One computation of a stage.

    Attributes:
        part: forward or backward.
        microbatch: number of the micro-batch.
    """

    part: Part
    microbatch: int

    def __str__(self) -> str:
        return f"{self.part.value}{self.microbatch}"


Orders = tuple[tuple[Work, ...], ...]
"""For each stage what it computes, in order."""
