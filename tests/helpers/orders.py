"""Orders of the literature, whose bubble and memory have closed forms.

An order knows no messages: a forward needs the one before it along the chain, a backward the one
after it, and the weight part of a backward its input part. `timed_orders` times it and counts the
micro-batches that are held. The classic results for p equal stages::

    order                    bubble, seconds            micro-batches held at once
    fill_drain               (p - 1) (F + B + W)        M
    one_f_one_b              (p - 1) (F + B + W)        p - k by stage k
    zero_bubble, ahead=1     (p - 1) (F + B - W)        p
    zero_bubble, ahead=2     (p - 1) (F + B - 2 W)      2 p - 1

with F, B and W the seconds of a forward, of the input part of a backward and of its weight part.
The last line holds where devices need not wait for each other between steps: each is busy from its
first forward to its last weight gradient.
"""

from enum import StrEnum
from typing import NamedTuple

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import LookAhead


class Part(StrEnum):
    """The kinds of computations of a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward; if the order has WEIGHT, only the gradients of the stage's inputs."""
    WEIGHT = "W"


class Work(NamedTuple):
    """One computation of a stage.

    Attributes:
        part: forward, backward, or the weight part of a backward.
        microbatch: number of the micro-batch.
    """

    part: Part
    microbatch: int

    def __str__(self) -> str:
        return f"{self.part.value}{self.microbatch}"


Orders = tuple[tuple[Work, ...], ...]
"""For each stage, its computations in order."""


def fill_drain(stages: int, microbatches: int) -> Orders:
    """All forwards, then all backwards, the youngest first (GPipe, arXiv 1811.06965)."""
    _check(stages, microbatches)
    forward = tuple(Work(Part.FORWARD, m) for m in range(microbatches))
    backward = tuple(Work(Part.BACKWARD, m) for m in reversed(range(microbatches)))
    return (forward + backward,) * stages


def one_f_one_b(stages: int, microbatches: int) -> Orders:
    """After a warm-up forwards and backwards in turn (PipeDream-Flush, arXiv 2006.09503).

    Three stages, four micro-batches::

        stage 0   F0 F1 F2 B0 F3 B1 B2 B3
        stage 1   F0 F1 B0 F2 B1 F3 B2 B3
        stage 2   F0 B0 F1 B1 F2 B2 F3 B3
    """
    _check(stages, microbatches)
    return tuple(_alternating(stages - k, microbatches, None) for k in range(stages))


def zero_bubble(stages: int, microbatches: int, *, ahead: int = 1) -> Orders:
    """Split backwards, whose weight parts fill what would be bubble (arXiv 2401.10241).

    `ahead=1` (ZB-H1) holds no more micro-batches than 1F1B on its first stage; `ahead=2` (ZB-H2)
    starts nearly twice as many. Stage k puts off a weight part until `ahead * k` more input parts
    are done. Two stages, three micro-batches, `ahead=1`::

        stage 0   F0 F1 B0 W0 F2 B1 W1 B2 W2
        stage 1   F0 B0 F1 B1 W0 F2 B2 W1 W2

    Raises:
        PlanError: see the other orders; `ahead` is neither 1 nor 2.
    """
    _check(stages, microbatches)
    if ahead not in (1, 2):
        raise PlanError(f"ahead({ahead}) must be 1 (ZB-H1) or 2 (ZB-H2)")
    return tuple(
        _alternating(ahead * (stages - k) - (ahead - 1), microbatches, ahead * k)
        for k in range(stages)
    )


def streamed(schedule: LookAhead, stages: int, batches: int) -> Orders:
    """The computations of each stage between two barriers of a streamed schedule."""
    return tuple(_looking_ahead(a, batches) for a in schedule.look_aheads(stages))


def _looking_ahead(ahead: int, batches: int) -> tuple[Work, ...]:
    order: list[Work] = []
    started = 0
    for batch in range(batches):
        last = min(batch + ahead, batches - 1)
        order += [Work(Part.FORWARD, b) for b in range(started, last + 1)]
        order.append(Work(Part.BACKWARD, batch))
        started = last + 1
    return tuple(order)


def _alternating(warm_up: int, microbatches: int, delay: int | None) -> tuple[Work, ...]:
    """`warm_up` forwards, then backward and forward in turn; `delay` of the weight parts."""
    started = min(warm_up, microbatches)
    order = [Work(Part.FORWARD, m) for m in range(started)]
    weights = 0
    for m in range(microbatches):
        order.append(Work(Part.BACKWARD, m))
        if delay is not None and m >= delay:
            order.append(Work(Part.WEIGHT, weights))
            weights += 1
        if started < microbatches:
            order.append(Work(Part.FORWARD, started))
            started += 1
    if delay is not None:
        order += [Work(Part.WEIGHT, m) for m in range(weights, microbatches)]
    return tuple(order)


def _check(stages: int, microbatches: int) -> None:
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise PlanError(f"{name}({value}) must be at least 1")
