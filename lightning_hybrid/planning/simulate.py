"""Time a schedule: its own instruction lists, event by event."""

from collections import defaultdict, deque
from dataclasses import dataclass

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.step_time import StepCosts
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
        copy: of the stage, that runs it.
    """

    stage: int
    instruction: Instruction
    start_s: float
    end_s: float
    copy: int = 0


@dataclass(frozen=True)
class Timeline:
    """One step of a replica, as simulated.

    Attributes:
        events: all that was run, in the order in which the simulation took it.
        makespan_s: seconds from the start of the forward pass until the last device has stepped.
    """

    events: tuple[Event, ...]
    makespan_s: float


def simulate(schedule: Schedule, costs: StepCosts) -> Timeline:
    """Execute the lists of a schedule on clocks instead of devices.

    A device runs one instruction after the other; one with several stages runs their lists merged
    into one. Sends cost the sender nothing; the messages from one device to another travel one at a
    time, and the two directions don't disturb each other. What stages on one device hand each other
    is there at once. The all-reduce of a stage runs beside its last backward (or its weight part)
    and ends no earlier than this; those of a device follow each other. `step_time.fill_drain_s`
    gives the same makespan of fill-drain in a fraction of the time.

    Args:
        schedule: What to run.
        costs: What its stages take.

    Raises:
        PlanError: the costs are those of another number of stages, devices are left out, or the
            schedule cannot be run.
    """
    places = tuple(costs.devices)
    count = len(set(places))
    if len(places) != schedule.stages or set(places) != set(range(count)):
        raise PlanError(
            f"devices{places} must name one of 0, 1 ... for each of {schedule.stages} stages"
        )
    run = _Run(costs)
    # The backward list of a device simply follows its forward list: the driver starts the backward
    # pass when its forward is over, and all others wait for its gradients.
    for lists in (schedule.forward, schedule.backward):
        for stage, instruction in execute_merged(merge(lists, places)):
            run.take(stage, instruction)
    steps_s = [0.0] * count
    for device, seconds in zip(places, costs.step_s):
        steps_s[device] += seconds
    ends_s = map(max, zip(run.clock_s, run.reduced_s))
    return Timeline(
        events=tuple(run.events),
        makespan_s=max(end_s + step for end_s, step in zip(ends_s, steps_s)),
    )


class _Run:
    """A simulated step: clocks of the devices, and of the links between them.

    Args:
        costs: what the stages take.

    Attributes:
        clock_s: by device, when it is done with what it was given so far.
        reduced_s: by device, when its all-reduces are over.
        events: what has run so far.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs, self._devices = costs, costs.devices
        self._seconds = {
            Kind.FORWARD: costs.forward_s,
            Kind.BACKWARD: costs.backward_s,
            Kind.WEIGHT: costs.weight_s,
        }
        # the last stage and the first one are joined as well: inputs take no time on their way
        self._edges = [*zip(costs.send_s, costs.latency_s), (0.0, 0.0)]
        count = len(set(costs.devices))
        self.clock_s, self.reduced_s = [0.0] * count, [0.0] * count
        self.events: list[Event] = []
        self._link_free_s = defaultdict[tuple[int, int], float](float)  # by source and target
        # by source and target stage, when the messages on their way arrive, in order
        self._arrivals_s = defaultdict[tuple[int, int], deque[float]](deque)

    def take(self, stage: int, instruction: Instruction) -> None:
        """Execute an instruction of a stage."""
        device, kind = self._devices[stage], instruction.kind
        start_s = self.clock_s[device]
        if kind.computes:
            end_s = self.clock_s[device] = start_s + self._seconds[kind][stage]
        elif kind is Kind.REDUCE:
            start_s = max(start_s, self.reduced_s[device])
            end_s = self.reduced_s[device] = start_s + self._costs.reduce_s[stage]
        elif kind.is_send:
            start_s, end_s = self._send(stage, instruction)
        else:
            link = (instruction.peer(stage, len(self._devices)), stage)
            end_s = self.clock_s[device] = max(start_s, self._arrivals_s[link].popleft())
        self.events.append(Event(stage, instruction, start_s, end_s))

    def _send(self, stage: int, instruction: Instruction) -> tuple[float, float]:
        along = instruction.kind is not Kind.SEND_GRADIENT
        edge = (stage, instruction.peer(stage, len(self._devices)))
        source, target = link = (self._devices[edge[0]], self._devices[edge[1]])
        start_s = end_s = self.clock_s[source]
        if source != target:
            send_s, latency_s = self._edges[stage if along else edge[1]]
            start_s = max(start_s, self._link_free_s[link])
            self._link_free_s[link] = start_s + send_s
            end_s = start_s + send_s + latency_s
        self._arrivals_s[edge].append(end_s)
        return start_s, end_s
