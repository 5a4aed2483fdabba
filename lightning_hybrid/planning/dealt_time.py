"""Time a schedule whose stages have copies: the dealt lists, event by event.

Two things have no counterpart where each stage has one device. A device that feeds several copies
has one way out: its messages leave one after the other, to whomever they go. And the gradients of a
stage travel when the last of its copies has begun its last backward.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.simulate import Event, Timeline
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import (
    Copy,
    DealtSchedule,
    Instruction,
    Kind,
    collected,
    deal,
    make_schedule,
)

Edge = tuple[Copy, Copy]
Order = tuple[tuple[Copy, Instruction, Copy], ...]


@dataclass(frozen=True, kw_only=True)
class DealtCosts:
    """What the parts of a step take, in seconds.

    Attributes:
        forward_s: by stage and copy, forward of one micro-batch.
        backward_s: likewise, its backward; where that is split, the input part.
        weight_s: likewise, the weight part where it is split.
        step_s: likewise, the optimizer step.
        reduce_s: by stage, the all-reduce of its gradients over its copies in all replicas.
        edges: by the copies at both ends, in the direction of the forward pass, how long a
            micro-batch keeps the sender's way out, and how much later it is there; gradients take
            the same on their way back. Inputs go from the driver to copies of stage 0, outputs from
            copies of the last stage to the driver. Edges that are left out take nothing.
    """

    forward_s: Sequence[Sequence[float]]
    backward_s: Sequence[Sequence[float]]
    weight_s: Sequence[Sequence[float]]
    step_s: Sequence[Sequence[float]]
    reduce_s: Sequence[float]
    edges: Mapping[Edge, tuple[float, float]] = field(default_factory=dict)

    @property
    def copies(self) -> tuple[int, ...]:
        """How many copies each stage has."""
        return tuple(map(len, self.forward_s))

    @classmethod
    def alike(cls, costs: StepCosts, copies: Sequence[int]) -> "DealtCosts":
        """Those of a chain, where all copies of a stage are alike; `reduce_s` is over all owners.

        Raises:
            PlanError: stages of the chain share devices.
        """
        if len(set(costs.devices)) < len(costs.devices):
            raise PlanError(
                f"devices{tuple(costs.devices)}: stages with copies do not share devices"
            )

        def each(seconds: Sequence[float]) -> list[list[float]]:
            return [[value] * count for value, count in zip(seconds, copies)]

        return cls(
            forward_s=each(costs.forward_s),
            backward_s=each(costs.backward_s),
            weight_s=each(costs.weight_s),
            step_s=each(costs.step_s),
            reduce_s=costs.reduce_s,
            edges={
                (Copy(stage, i), Copy(stage + 1, j)): link
                for stage, link in enumerate(zip(costs.send_s, costs.latency_s))
                for i in range(copies[stage])
                for j in range(copies[stage + 1])
            },
        )


def simulate_dealt(dealt: DealtSchedule, costs: DealtCosts) -> Timeline:
    """Execute dealt lists on one clock for each device.

    Where each stage has one copy, the times are those of `simulate`.

    Args:
        dealt: The lists, of `collected` copies.
        costs: Of the stages with layers.

    Raises:
        PlanError: the costs are those of other copies, or the lists cannot be run.
    """
    if collected(costs.copies) != dealt.copies:
        raise PlanError(
            f"copies{dealt.copies} of the lists are not copies{costs.copies} of the costs"
        )
    return _timed(_order(dealt, costs.copies), costs)


def dealt_s(costs: DealtCosts, microbatches: int) -> float:
    """Seconds of one step of fill-drain, from the first forward to the last optimizer step.

    That of `simulate_dealt`, without events where only neighbouring stages wait for each other:
    made to be called thousands of times.
    """
    copies = costs.copies
    if copies[-1] > 1 or any(target.stage != source.stage + 1 for source, target in costs.edges):
        return _timed(_fill_drain(copies, microbatches), costs).makespan_s
    return _fill_drain_s(costs, copies, microbatches)


def _fill_drain_s(costs: DealtCosts, copies: tuple[int, ...], microbatches: int) -> float:
    stages = range(len(copies))
    clock_s = [[0.0] * count for count in copies]
    out_s = [[0.0] * count for count in copies]  # when the last message of each has left
    last_s = [[0.0] * count for count in copies]  # when the last backward of each began
    nothing = 0.0, 0.0
    for forward in (True, False):
        seconds = costs.forward_s if forward else costs.backward_s
        turn = 1 if forward else -1
        # after the forwards a copy without a micro-batch has nothing to wait for
        last_s = [[*clocks] for clocks in clock_s]
        for number in range(microbatches)[::turn]:
            arrived_s = 0.0
            for stage in stages[::turn]:
                copy = number % copies[stage]
                start_s = last_s[stage][copy] = max(clock_s[stage][copy], arrived_s)
                end_s = clock_s[stage][copy] = start_s + seconds[stage][copy]
                other = stage + turn
                if not 0 <= other < len(copies):
                    break
                ends = Copy(stage, copy), Copy(other, number % copies[other])
                send_s, latency_s = costs.edges.get(ends if forward else ends[::-1], nothing)
                if send_s:  # what takes no time waits for nothing
                    end_s = max(end_s, out_s[stage][copy])
                    out_s[stage][copy] = end_s + send_s
                arrived_s = end_s + send_s + latency_s
    return max(
        max(clock, max(last_s[stage]) + costs.reduce_s[stage]) + step
        for stage in stages
        for clock, step in zip(clock_s[stage], costs.step_s[stage])
    )


def _timed(order: Order, costs: DealtCosts) -> Timeline:
    run = _Run(costs)
    for place, step, other in order:
        run.take(place, step, other)
    return run.timeline()


@lru_cache(maxsize=512)
def _fill_drain(copies: tuple[int, ...], microbatches: int) -> Order:
    stages = collected(copies)
    return _order(deal(make_schedule("gpipe", len(stages), microbatches), stages), copies)


def _order(dealt: DealtSchedule, copies: tuple[int, ...]) -> Order:
    """A possible order of all instructions, with the other end of each send or receive."""
    collects = copies != dealt.copies
    return tuple(
        (
            place,
            step,
            dealt.peer(place, step) if step.kind.is_send or step.kind.is_receive else place,
        )
        for lists in (dealt.forward, dealt.backward)
        for place, step in dealt.execute(lists, collects=collects)
    )


class _Run:
    """A simulated step: clocks of the devices, and of their ways out."""

    def __init__(self, costs: DealtCosts) -> None:
        self._costs, last = costs, len(costs.copies) - 1
        # what collects has no layers, and is on the driver, as is the last copy
        self._driver, self._collects = Copy(last, costs.copies[-1] - 1), Copy(last + 1, 0)
        self._seconds = {
            Kind.FORWARD: costs.forward_s,
            Kind.BACKWARD: costs.backward_s,
            Kind.WEIGHT: costs.weight_s,
        }
        self._clock_s = defaultdict[Copy, float](float)
        self._out_s = defaultdict[Copy, float](float)  # when its last message has left
        self._arrivals_s = defaultdict[Edge, deque[float]](deque)
        self._ready_s = [0.0] * len(costs.reduce_s)  # when a stage's gradients may travel
        self._reduces: list[tuple[Copy, Instruction]] = []
        self._events: list[Event] = []

    def take(self, place: Copy, step: Instruction, other: Copy) -> None:
        """Execute an instruction of a copy, with the copy at its other end."""
        device = self._driver if place == self._collects else place
        start_s = self._clock_s[device]
        if seconds := self._seconds.get(step.kind):
            taken_s = 0.0 if place == self._collects else seconds[place.stage][place.number]
            end_s = self._clock_s[device] = start_s + taken_s
        elif place == self._collects and step.kind is Kind.REDUCE:
            return
        elif step.kind is Kind.REDUCE:  # its end is known when all have come to it
            self._ready_s[place.stage] = max(self._ready_s[place.stage], start_s)
            self._reduces.append((place, step))
            return
        elif step.kind.is_send:
            back = step.kind is Kind.SEND_GRADIENT
            edge = (other, place) if back else (place, other)
            send_s, latency_s = self._costs.edges.get(edge, (0.0, 0.0))
            if send_s:  # what takes no time waits for nothing
                start_s = max(start_s, self._out_s[device])
                self._out_s[device] = start_s + send_s
            end_s = start_s + send_s + latency_s
            self._arrivals_s[place, other].append(end_s)
        else:
            end_s = self._clock_s[device] = max(start_s, self._arrivals_s[other, place].popleft())
        self._events.append(Event(place.stage, step, start_s, end_s, place.number))

    def timeline(self) -> Timeline:
        """All that has run, with the all-reduces and the optimizer steps."""
        finish_s = 0.0
        for place, step in self._reduces:
            start_s = self._ready_s[place.stage]
            end_s = start_s + self._costs.reduce_s[place.stage]
            self._events.append(Event(place.stage, step, start_s, end_s, place.number))
            step_s = self._costs.step_s[place.stage][place.number]
            finish_s = max(finish_s, max(self._clock_s[place], end_s) + step_s)
        return Timeline(tuple(self._events), finish_s)
