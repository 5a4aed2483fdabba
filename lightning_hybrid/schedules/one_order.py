"""Put the messages of all devices into one order, in which no device needs a buffer.

A send may block until its receive has begun: NCCL has buffers of some MB, and with
``CUDA_LAUNCH_BLOCKING=1`` neither a send nor a receive lets the host go on before it is over. So
each receive is begun at the time of its send, and this time is the same on both devices: half a
tick after the computation before the send. Computations have whole ticks, and each device carries
out its list by rising time. Copies of a stage wait for each other when they average their gradients
in a last computation, so that all of them do so at the same tick.

Devices therefore never wait for each other in a circle, whatever blocks. Take the operation with
the smallest time that is left anywhere: all before it on its device is over, and if it is a
message, all before it on the other device too, so both ends meet. If less blocks (receives that are
waited for when they are needed, sends beside a computation), devices wait less.

A message has a tick of its own to travel: its receive begins before the computation in front of the
one that needs it. Inputs are sent as late as that allows.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules.dealt import StageCopy
from lightning_hybrid.schedules.instructions import Instruction, InstructionKind, exchange

_TRAVELS = 2
"""Ticks from the computation before a send to the first computation that may need the message."""
_EXPECT = {
    InstructionKind.SEND_INPUT: InstructionKind.EXPECT_ACTIVATION,
    InstructionKind.SEND_ACTIVATION: InstructionKind.EXPECT_ACTIVATION,
    InstructionKind.SEND_GRADIENT: InstructionKind.EXPECT_GRADIENT,
}

Steps = Sequence[tuple[StageCopy, Instruction]]
Peer = Callable[[StageCopy, Instruction], StageCopy]


@dataclass
class _Timed:
    """An instruction with its time.

    Attributes:
        place: the copy of a stage that the instruction belongs to.
        step: the instruction.
        time: in ticks; infinite until it is known.
        number: for a message, its number in the order of the sends, which decides between messages
            of one time; 0 for other instructions.
    """

    place: StageCopy
    step: Instruction
    time: float = inf
    number: int = 0


@dataclass
class _DeviceClock:
    """What a device does, and when, as far as the simulation of all devices has come.

    Attributes:
        steps: all instructions of the device so far.
        clock: tick of its last computation; -1: there was none.
        ready: first tick at which the messages for its next computation have arrived.
        next: instructions that get the tick of the next computation.
        inputs: sends of network inputs that the next computation needs; they get their time from
            it.
    """

    steps: list[_Timed] = field(default_factory=list)
    clock: int = -1
    ready: int = 0
    next: list[_Timed] = field(default_factory=list)
    inputs: list[_Timed] = field(default_factory=list)

    def averaging(self) -> list[_Timed]:
        """List the REDUCE instructions that get the tick of the next computation."""
        return [each for each in self.next if each.step.kind is InstructionKind.REDUCE]

    def needs(self, message: _Timed, *, is_here: bool) -> None:
        """Note that the next computation needs a message.

        Args:
            message: the send of this message, which has its time already; inputs get another time.
            is_here: whether this device itself sends it, so that it does not travel.
        """
        if message.step.kind is InstructionKind.SEND_INPUT:
            self.inputs.append(message)
        elif not is_here:
            self.ready = max(self.ready, int(message.time - 0.5) + _TRAVELS)

    def compute(self, averages: Mapping[int, int]) -> None:
        """Advance to the next computation, and give it and all that belongs to it their times.

        Args:
            averages: by stage, the first tick at which all of its copies can average their
                gradients; 0 for a stage that is not in it.
        """
        together = [averages.get(each.place.stage, 0) for each in self.averaging()]
        self.clock = max(self.clock + 1, self.ready, *together, 0)
        for each in self.next:
            each.time = self.clock
        for message in self.inputs:
            message.time = self.clock - _TRAVELS + 0.5
        self.next = []
        self.inputs = []

    def end(self, averages: Mapping[int, int]) -> None:
        """Give times to those REDUCE that no computation follows: after the device's messages.

        A copy without micro-batches has such a REDUCE; the other copies of its stage wait for it.

        Args:
            averages: as in `compute`.
        """
        for each in self.averaging():
            each.time = max(self.clock + 0.75, averages.get(each.place.stage, 0))


def in_one_order(lists: Sequence[Steps], peer: Peer) -> list[list[tuple[StageCopy, Instruction]]]:
    """Order the instructions of all devices so that they run without deadlock, whatever blocks.

    The lists of every schedule are so ordered before ranks execute them. Computations keep their
    order. Receives begin (EXPECT) at the time of their send, and inputs are sent later than in
    `lists`; see the module.

    Args:
        lists: By device, its instructions, as `(copy of a stage, instruction)`.
        peer: Function from a copy and its send or receive to the copy at the other end.

    Returns:
        By device, its instructions in the order in which it is to execute them, in the same form;
        with an EXPECT for each message from another device.

    Raises:
        PlanError: The lists cannot be run even if sends do not block, or copies of a stage would
            wait for each other for ever.
    """
    averages: dict[int, int] = {}
    # (each round delays stages whose copies wait for stages that the round before has delayed)
    for _ in range(2 + len({place.stage for steps in lists for place, _ in steps})):
        devices, later = _timed(lists, peer, averages)
        if later == averages:
            return [
                [(s.place, s.step) for s in sorted(each.steps, key=lambda s: (s.time, s.number))]
                for each in devices
            ]
        averages = later
    raise PlanError("deadlock: copies of a stage wait for each other")


def _timed(
    lists: Sequence[Steps], peer: Peer, averages: Mapping[int, int]
) -> tuple[list[_DeviceClock], dict[int, int]]:
    """Give all instructions a time; see the module.

    Args:
        lists: By device, its instructions, as `(copy of a stage, instruction)`.
        peer: Function from a copy and its send or receive to the copy at the other end.
        averages: by stage, the first tick at which its copies may average their gradients; 0 for a
            stage that is not in it.

    Returns:
        `(devices, averages)`: what each device does when; and by stage the tick at which the last
        of its copies averages. If these are not the given ones, other copies must wait too.
    """
    devices = [_DeviceClock() for _ in lists]
    on = {place: device for steps, device in zip(lists, devices) for place, _ in steps}
    links: dict[tuple[StageCopy, StageCopy], deque[_Timed]] = {}
    sent, later = list[_Timed](), dict[int, int]()
    for place, step in exchange(lists, peer, str):
        device, timed = on[place], _Timed(place, step)
        device.steps.append(timed)
        if step.kind.is_send:
            timed.time = device.clock + 0.5
            timed.number = len(sent)
            links.setdefault((place, peer(place, step)), deque()).append(timed)
            sent.append(timed)
            continue
        device.next.append(timed)
        if step.kind.is_receive:
            message = links[peer(place, step), place].popleft()
            device.needs(message, is_here=on[message.place] is device)
        elif step.kind.computes:
            averaged = device.averaging()
            device.compute(averages)
            for each in averaged:
                later[each.place.stage] = max(later.get(each.place.stage, 0), device.clock)
    for device in devices:
        device.end(averages)
    for message in sent:
        target = peer(message.place, message.step)
        if on[target] is not on[message.place]:
            expect = Instruction(_EXPECT[message.step.kind], message.step.microbatch)
            on[target].steps.append(_Timed(target, expect, message.time, message.number))
    return devices, later
