"""Simulate a step of a schedule: time its instruction lists event by event.

If stages have copies, two rules are added: a device that sends to several copies sends one message
at a time, to whichever copy; and the all-reduce of a stage's gradients begins when the last of its
copies has begun its last backward.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import (
    DealtSchedule,
    Instruction,
    InstructionKind,
    Schedule,
    StageCopy,
    by_device,
    collected,
    execute_merged,
)

Edge = tuple[StageCopy, StageCopy]
Order = Iterable[tuple[StageCopy, Instruction, StageCopy]]
"""Instructions in an order in which they may run. Each has the copy of a stage that runs it, and
the copy at the other end of its message (the same copy, if it is no message)."""


@dataclass(frozen=True, slots=True)
class Event:
    """An instruction with its simulated start and end.

    A send lasts while its message is on the link, a receive while the device waits for the message,
    a REDUCE during the all-reduce. Only forward, backward and weight keep the device busy.

    Attributes:
        stage: number of the stage that runs it.
        instruction: the instruction.
        start_s: its start, in seconds from the start of the forward pass.
        end_s: its end, in seconds from the start of the forward pass.
        copy: number of the stage's copy that runs it.
    """

    stage: int
    instruction: Instruction
    start_s: float
    end_s: float
    copy: int = 0


@dataclass(frozen=True)
class Timeline:
    """One simulated step of a replica.

    Attributes:
        events: the instructions, in the order in which they were simulated.
        makespan_s: seconds from the start of the forward pass until the last device has stepped.
    """

    events: tuple[Event, ...]
    makespan_s: float


@dataclass(frozen=True, kw_only=True)
class DealtCosts:
    """Times of the parts of a step whose stages have copies, in seconds.

    Attributes:
        forward_s: by stage and copy, forward of one micro-batch.
        backward_s: by stage and copy, backward of one micro-batch; if it is split, the input part.
        weight_s: by stage and copy, the weight part of a split backward; 0: not split.
        step_s: by stage and copy, the optimizer step.
        reduce_s: by stage, the all-reduce of its gradients over its copies in all replicas.
        edges: for two copies between which messages go, in the direction of the forward pass: the
            seconds for which the message of a micro-batch occupies the sender's link, and the
            seconds that it then takes to arrive. Gradients take the same times on their way back.
            Inputs go from the driver to copies of stage 0, outputs from copies of the last stage to
            the driver. Messages on other edges take no time.
    """

    forward_s: Sequence[Sequence[float]]
    backward_s: Sequence[Sequence[float]]
    weight_s: Sequence[Sequence[float]]
    step_s: Sequence[Sequence[float]]
    reduce_s: Sequence[float]
    edges: Mapping[Edge, tuple[float, float]] = field(default_factory=dict)

    @property
    def copies(self) -> tuple[int, ...]:
        """Number of copies of each stage."""
        return tuple(map(len, self.forward_s))

    @classmethod
    def alike(cls, costs: StepCosts, copies: Sequence[int]) -> "DealtCosts":
        """Make costs in which all copies of a stage have equal times.

        Args:
            costs: times by stage; `reduce_s` must be the all-reduces over the copies of a stage in
                all replicas.
            copies: by stage, its number of copies.
        """

        def each(seconds: Sequence[float]) -> list[list[float]]:
            return [[value] * count for value, count in zip(seconds, copies)]

        return cls(
            forward_s=each(costs.forward_s),
            backward_s=each(costs.backward_s),
            weight_s=each(costs.weight_s),
            step_s=each(costs.step_s),
            reduce_s=costs.reduce_s,
            edges={
                (StageCopy(stage, i), StageCopy(stage + 1, j)): link
                for stage, link in enumerate(zip(costs.send_s, costs.latency_s))
                for i in range(copies[stage])
                for j in range(copies[stage + 1])
            },
        )


def simulate(schedule: Schedule, costs: StepCosts) -> Timeline:
    """Simulate a step of a schedule whose stages have no copies.

    A device runs one instruction at a time; if it has several stages, their lists are merged into
    one. Sends take none of the sender's time. Messages from one device to another are transferred
    one at a time; the two directions are independent. Messages between stages of one device take no
    time. The all-reduce of a stage begins with its last backward (or weight part) and overlaps it;
    all-reduces of one device run one after the other. `step_time.fill_drain_s` gives the same
    makespan for fill-drain in a fraction of the time.

    Args:
        schedule: The schedule.
        costs: Times of its stages, and the device of each. The devices are numbered from 0 without
            gaps.

    Raises:
        PlanError: the costs are for another number of stages, the numbers of devices have gaps, or
            the schedule cannot be run.
    """
    places = tuple(costs.devices)
    count = len(set(places))
    if len(places) != schedule.stages or set(places) != set(range(count)):
        raise PlanError(
            f"devices{places} must name one of 0, 1 ... for each of {schedule.stages} stages"
        )
    # The backward list of a device follows its forward list: the driver begins the backward pass
    # when its forward pass is over, and all others wait for its gradients.
    order = _order(
        (
            (StageCopy(stage, 0), step)
            for lists in by_device(schedule, places)
            for stage, step in execute_merged(lists)
        ),
        lambda place, step: StageCopy(step.peer(place.stage, schedule.stages), 0),
    )
    devices = {StageCopy(stage, 0): device for stage, device in enumerate(places)}
    return _SimulatedStep(DealtCosts.alike(costs, (1,) * schedule.stages), devices).timeline(order)


def simulate_dealt(dealt: DealtSchedule, costs: DealtCosts) -> Timeline:
    """Simulate a step of a schedule whose stages have copies, each copy on a device of its own.

    If each stage has one copy, the times are those of `simulate`.

    Args:
        dealt: The schedule; if the last stage has several copies, with the stage that `collected`
            adds.
        costs: Times of the stages, without that added stage, which computes nothing.

    Raises:
        PlanError: schedule and costs have different numbers of copies, or the lists cannot be run.
    """
    copies = costs.copies
    if collected(copies) != dealt.copies:
        raise PlanError(f"copies{dealt.copies} of the lists are not copies{copies} of the costs")
    lists, collects = (dealt.forward, dealt.backward), copies != dealt.copies
    steps = chain.from_iterable(dealt.execute(each, collects=collects) for each in lists)
    places = [
        StageCopy(stage, number) for stage, count in enumerate(copies) for number in range(count)
    ]
    devices = {place: device for device, place in enumerate(places)}
    # the stage that collects the outputs is on the driver, as is the last copy
    devices[StageCopy(len(copies), 0)] = len(places) - 1
    return _SimulatedStep(costs, devices, one_way_out=True).timeline(_order(steps, dealt.peer))


def _order(
    steps: Iterable[tuple[StageCopy, Instruction]],
    peer: Callable[[StageCopy, Instruction], StageCopy],
) -> Order:
    """Add to each instruction the copy at the other end of its message.

    Args:
        steps: Instructions, each with the copy of a stage that runs it.
        peer: Function from the copy that runs a send or receive, and this instruction, to the copy
            at the other end.

    Yields:
        The copy that runs the instruction, the instruction, and the copy at the other end of its
        message; or again the first copy, if the instruction is no message.
    """
    for place, step in steps:
        travels = step.kind.is_send or step.kind.is_receive
        yield place, step, peer(place, step) if travels else place


class _SimulatedStep:
    """State of a simulated step: clocks of the devices, and of the links between them.

    Args:
        costs: times of the stages.
        devices: by copy of a stage, the index of its device in the replica.
        one_way_out: True: a device sends one message at a time, whatever the receiver. False: one
            message at a time to each receiver.
    """

    def __init__(
        self, costs: DealtCosts, devices: Mapping[StageCopy, int], *, one_way_out: bool = False
    ) -> None:
        self._costs = costs
        self._devices = devices
        self._one_way_out = one_way_out
        self._seconds = {
            InstructionKind.FORWARD: costs.forward_s,
            InstructionKind.BACKWARD: costs.backward_s,
            InstructionKind.WEIGHT: costs.weight_s,
        }
        self._clock_s = [0.0] * (max(devices.values()) + 1)
        self._link_free_s = defaultdict[tuple[int, int], float](float)
        # by source and target, arrival times of the messages that are sent and not received
        self._arrivals_s = defaultdict[Edge, deque[float]](deque)
        self._ready_s = [0.0] * len(costs.reduce_s)  # when a stage's all-reduce may begin
        self._reduces: list[tuple[StageCopy, Instruction]] = []
        self._events: list[Event] = []

    def timeline(self, order: Order) -> Timeline:
        """Simulate the instructions in this order, then all-reduces and optimizer steps."""
        for place, step, other in order:
            self._take(place, step, other)
        reduced_s, steps_s = [0.0] * len(self._clock_s), [0.0] * len(self._clock_s)
        # an all-reduce begins when all copies have reached it, which is known now
        for place, step in self._reduces:
            device = self._devices[place]
            start_s = max(self._ready_s[place.stage], reduced_s[device])
            end_s = reduced_s[device] = start_s + self._costs.reduce_s[place.stage]
            self._events.append(Event(place.stage, step, start_s, end_s, place.number))
            steps_s[device] += self._costs.step_s[place.stage][place.number]
        finish_s = map(sum, zip(map(max, zip(self._clock_s, reduced_s)), steps_s))
        return Timeline(tuple(self._events), max(finish_s))

    def _take(self, place: StageCopy, step: Instruction, other: StageCopy) -> None:
        device, kind = self._devices[place], step.kind
        collects = place.stage == len(self._ready_s)  # the stage without layers
        start_s = self._clock_s[device]
        if kind is InstructionKind.REDUCE:
            if not collects:
                self._ready_s[place.stage] = max(self._ready_s[place.stage], start_s)
                # other copies may reach it later: its start is known at the end
                self._reduces.append((place, step))
            return
        if kind.computes:
            seconds = 0.0 if collects else self._seconds[kind][place.stage][place.number]
            end_s = self._clock_s[device] = start_s + seconds
        elif kind.is_send:
            start_s, end_s = self._send(
                place, other, start_s, kind is InstructionKind.SEND_GRADIENT
            )
            self._arrivals_s[place, other].append(end_s)
        else:
            end_s = self._clock_s[device] = max(start_s, self._arrivals_s[other, place].popleft())
        self._events.append(Event(place.stage, step, start_s, end_s, place.number))

    def _send(
        self, place: StageCopy, other: StageCopy, start_s: float, back: bool
    ) -> tuple[float, float]:
        """Simulate a send, and note how long it occupies its link.

        Args:
            place: the copy that sends.
            other: the copy that receives.
            start_s: the second at which the sender reaches the send.
            back: whether it sends a gradient, to an earlier stage.

        Returns:
            The second at which the transfer begins, and that at which the message arrives.
        """
        source, target = self._devices[place], self._devices[other]
        edge = (other, place) if back else (place, other)
        send_s, latency_s = self._costs.edges.get(edge, (0.0, 0.0))
        # messages within a device take no time
        if source == target:
            return start_s, start_s
        link = (source, source if self._one_way_out else target)
        if send_s:  # a message that takes no time does not wait for earlier ones
            start_s = max(start_s, self._link_free_s[link])
            self._link_free_s[link] = start_s + send_s
        return start_s, start_s + send_s + latency_s
