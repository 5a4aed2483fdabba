"""Time a schedule: its own instruction lists, event by event."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import Instruction, Kind, Schedule, execute_merged, merge


@dataclass(frozen=True, slots=True)
class Event:
    """An instruction and when it ran.

    A send lasts while its message is on the link, a receive while the device waits for it, a
    reduction while gradients travel. Only forward, backward and weight keep the device busy.

    Attributes:
        stage: number of the stage that runs it.
        instruction: what is run.
        start_s: seconds from the start of the forward pass.
        end_s: likewise, when it is over.
    """

    stage: int
    instruction: Instruction
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step of a replica, as simulated.

    Attributes:
        events: all that was run, in the order in which the simulation took it.
        makespan_s: seconds from the start of the forward pass until the last device has stepped.
        busy_s: seconds that each device computes or steps; by stage, if each has a device of its
            own.
    """

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they neither compute nor step."""
        total_s = len(self.busy_s) * self.makespan_s
        return (total_s - sum(self.busy_s)) / total_s if total_s else 0.0


def simulate(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    weight_s: Sequence[float] | float = 0.0,
    devices: Sequence[int] | None = None,
    send_s: Sequence[float] | float = 0.0,
    latency_s: Sequence[float] | float = 0.0,
    input_s: float = 0.0,
    driver_s: float = 0.0,
    reduce_s: Sequence[float] | float = 0.0,
    step_s: Sequence[float] | float = 0.0,
) -> Timeline:
    """Execute the lists of a schedule on clocks instead of devices.

    A device runs one instruction after the other. Sends cost the sender nothing; the messages from
    one device to another travel one at a time, and the two directions don't disturb each other.
    What stages on one device hand each other is there at once. `step_time.fill_drain_s` gives the
    same makespan of fill-drain in a fraction of the time.

    Args:
        schedule: What to run.
        forward_s: Seconds of the forward of one micro-batch, per stage.
        backward_s: The same for the backward; where that is split, for its input part.
        weight_s: The same for the weight part where it is split, or one for all.
        devices: Device of each stage, counted from 0. A device with several stages runs their lists
            merged into one. None: stage k has device k to itself.
        send_s: Seconds for which one micro-batch that crosses the cut after each stage keeps the
            link (`stages - 1` values, or one for all), in either direction.
        latency_s: Seconds by which it arrives later than that; the next message does not wait.
        input_s: Seconds in which one micro-batch of inputs, or its gradient, travels between the
            driver and stage 0.
        driver_s: Seconds of the user's code on the driver between forward and backward.
        reduce_s: Seconds of the all-reduce between the replicas of each stage, or one for all. It
            runs beside the last backward (or its weight part) and ends no earlier than this; those
            of a device follow each other.
        step_s: Seconds of the optimizer step of each stage, or one for all.

    Raises:
        PlanError: a list has not one entry per stage (or cut), an entry is negative or not a
            number, or the schedule cannot be run.
    """
    stages = schedule.stages
    places = tuple(range(stages)) if devices is None else tuple(devices)
    if len(places) != stages or set(places) != set(range(len(set(places)))):
        raise PlanError(f"devices{places} must name one of 0, 1 ... for each of {stages} stages")
    count = len(set(places))
    run = _Run(
        devices=places,
        forward_s=_per("forward_s", forward_s, stages),
        backward_s=_per("backward_s", backward_s, stages),
        weight_s=_per("weight_s", weight_s, stages),
        edge_s=(*_per("send_s", send_s, stages - 1), *_per("input_s", input_s, 1)),
        latency_s=(*_per("latency_s", latency_s, stages - 1), 0.0),
        reduce_s=_per("reduce_s", reduce_s, stages),
        clock_s=[0.0] * count,
        reduced_s=[0.0] * count,
        busy_s=[0.0] * count,
    )
    for stage, instruction in execute_merged(merge(schedule.forward, places)):
        run.take(stage, instruction)
    # The backward list of a device simply follows its forward list: the driver starts the backward
    # pass when its forward is over, and all others wait for its gradients.
    run.clock_s[places[-1]] += driver_s
    for stage, instruction in execute_merged(merge(schedule.backward, places)):
        run.take(stage, instruction)
    steps_s = [0.0] * count
    for device, seconds in zip(places, _per("step_s", step_s, stages)):
        steps_s[device] += seconds
    ends_s = map(max, zip(run.clock_s, run.reduced_s))
    return Timeline(
        events=tuple(run.events),
        makespan_s=max(end_s + step for end_s, step in zip(ends_s, steps_s)),
        busy_s=tuple(busy + step for busy, step in zip(run.busy_s, steps_s)),
    )


@dataclass
class _Run:
    """The clocks of a simulated step: those of the devices, and per link.

    Attributes:
        devices: of each stage its device.
        forward_s: by stage, seconds of the forward of a micro-batch.
        backward_s: by stage, seconds of its backward; where that is split, of its input part.
        weight_s: by stage, seconds of the weight part of a split backward.
        edge_s: seconds that a message keeps the link; edge k of the ring joins stage k and the next
            one.
        latency_s: by edge, seconds by which a message arrives later than that.
        reduce_s: by stage, seconds of its all-reduce.
        clock_s: by device, when it is done with what it was given so far.
        reduced_s: by device, when its all-reduces are over.
        busy_s: by device, seconds that it has computed.
        link_free_s: by source and target device, when the link is free again.
        arrivals_s: by source and target stage, when the messages on their way arrive, in order.
        events: what has run so far.
    """

    devices: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    edge_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    clock_s: list[float]
    reduced_s: list[float]
    busy_s: list[float]
    link_free_s: dict[tuple[int, int], float] = field(default_factory=dict)
    arrivals_s: dict[tuple[int, int], deque[float]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def take(self, stage: int, instruction: Instruction) -> None:
        device = self.devices[stage]
        start_s = self.clock_s[device]
        if instruction.kind.computes:
            end_s = self._compute(stage, instruction)
        elif instruction.kind is Kind.REDUCE:
            start_s = max(start_s, self.reduced_s[device])
            end_s = self.reduced_s[device] = start_s + self.reduce_s[stage]
        elif instruction.kind.is_send:
            start_s, end_s = self._send(stage, instruction)
        else:
            link = (instruction.peer(stage, len(self.devices)), stage)
            end_s = self.clock_s[device] = max(start_s, self.arrivals_s[link].popleft())
        self.events.append(Event(stage, instruction, start_s, end_s))

    def _compute(self, stage: int, instruction: Instruction) -> float:
        seconds = {
            Kind.FORWARD: self.forward_s,
            Kind.BACKWARD: self.backward_s,
            Kind.WEIGHT: self.weight_s,
        }
        duration_s = seconds[instruction.kind][stage]
        device = self.devices[stage]
        self.busy_s[device] += duration_s
        self.clock_s[device] += duration_s
        return self.clock_s[device]

    def _send(self, stage: int, instruction: Instruction) -> tuple[float, float]:
        along = instruction.kind is not Kind.SEND_GRADIENT
        edge = (stage, instruction.peer(stage, len(self.devices)))
        source, target = link = (self.devices[edge[0]], self.devices[edge[1]])
        start_s = end_s = self.clock_s[source]
        if source != target:
            number = stage if along else edge[1]
            start_s = max(start_s, self.link_free_s.get(link, 0.0))
            self.link_free_s[link] = start_s + self.edge_s[number]
            end_s = self.link_free_s[link] + self.latency_s[number]
        self.arrivals_s.setdefault(edge, deque()).append(end_s)
        return start_s, end_s


def _per(name: str, value: Sequence[float] | float, count: int) -> tuple[float, ...]:
    values = (value,) * count if isinstance(value, int | float) else tuple(value)
    if len(values) != count:
        raise PlanError(f"{name} has {len(values)} entries, {count} are needed: {list(values)}")
    for index, entry in enumerate(values):
        if not entry >= 0:  # also catches not-a-number
            raise PlanError(f"{name}[{index}] is {entry}: a time must be 0 s or more")
    return values
