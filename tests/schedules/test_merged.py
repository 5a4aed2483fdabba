"""Several stages on one device: one list that does what the stages' own lists do."""

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.schedules import Instruction, InstructionKind, Schedule, execute_merged
from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.instructions import PlacedInstruction
from lightning_hybrid.schedules.merged import merge_lists


@st.composite
def placements(draw: Any) -> list[int]:
    """Devices of up to nine stages; each device has one at least, device 0 the last."""
    count = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, count - 1), max_size=9 - count))
    first = draw(st.permutations([*range(1, count), *more]))
    return [*first, 0]


microbatches_ = st.integers(1, 7)


def passes(schedule: Schedule, devices: list[int]) -> Iterable[tuple[Any, Any]]:
    for lists in (schedule.forward, schedule.backward):
        yield lists, merge_lists(lists, devices)


@given(placements(), microbatches_, st.booleans())
def test_devices_with_several_stages_never_wait_in_a_circle(
    devices: list[int], microbatches: int, input_gradient: bool
) -> None:
    schedule = gpipe(len(devices), microbatches, input_gradient=input_gradient)
    for lists, merged in passes(schedule, devices):
        assert len(list(execute_merged(merged))) == sum(map(len, lists))


@given(placements(), microbatches_, st.booleans())
def test_each_stage_keeps_its_own_list(
    devices: list[int], microbatches: int, input_gradient: bool
) -> None:
    schedule = gpipe(len(devices), microbatches, input_gradient=input_gradient)
    for lists, merged in passes(schedule, devices):
        assert len(merged) == max(devices) + 1
        for stage, instructions in enumerate(lists):
            steps = merged[devices[stage]]
            assert [i for s, i in steps if s == stage] == list(instructions)


@given(placements(), microbatches_, st.booleans())
def test_two_devices_see_the_messages_between_them_in_one_order(
    devices: list[int], microbatches: int, input_gradient: bool
) -> None:
    """Headers and patterns of all stages share one control link per pair of devices."""
    schedule = gpipe(len(devices), microbatches, input_gradient=input_gradient)

    def framed(instruction: Instruction) -> bool:
        # inputs have no header, and gradients one before the first of them
        if instruction.kind in (
            InstructionKind.SEND_ACTIVATION,
            InstructionKind.RECEIVE_ACTIVATION,
        ):
            return True
        gradient = instruction.kind not in (InstructionKind.SEND_INPUT, InstructionKind.REDUCE)
        computes = instruction.kind in (InstructionKind.FORWARD, InstructionKind.BACKWARD)
        return gradient and not computes and instruction.microbatch == microbatches - 1

    def messages(
        steps: Iterable[PlacedInstruction], here: int, there: int, *, sent: bool
    ) -> list[Any]:
        """(sending stage, micro-batch) of what goes from ``here`` to ``there``."""
        found = []
        for stage, instruction in steps:
            kind = instruction.kind
            if not framed(instruction) or not (kind.is_send if sent else kind.is_receive):
                continue
            peer = instruction.peer(stage, len(devices))
            source, target = (stage, peer) if sent else (peer, stage)
            is_input = kind is InstructionKind.RECEIVE_ACTIVATION and target == 0
            if (devices[source], devices[target]) == (here, there) and not is_input:
                found.append((source, instruction.microbatch))
        return found

    for _, merged in passes(schedule, devices):
        for here in range(len(merged)):
            for there in {*range(len(merged))} - {here}:
                sent = messages(merged[here], here, there, sent=True)
                assert sent == messages(merged[there], here, there, sent=False)


@given(placements(), microbatches_)
def test_the_last_reduction_of_a_device_is_that_of_its_first_stage(
    devices: list[int], microbatches: int
) -> None:
    """The runtime averages the gradients of all stages of a device from there on."""
    for steps in merge_lists(gpipe(len(devices), microbatches).backward, devices):
        *_, last = (stage for stage, i in steps if i.kind is InstructionKind.REDUCE)
        position = steps.index((last, Instruction(InstructionKind.REDUCE, 0)))
        assert last == min(stage for stage, _ in steps)
        after = [
            (s, i.microbatch) for s, i in steps[position:] if i.kind is InstructionKind.BACKWARD
        ]
        assert after == [(last, 0)]


def test_a_loop_over_two_devices_alternates_between_their_stages() -> None:
    first, second = (
        [(s, i.microbatch) for s, i in steps if i.kind is InstructionKind.FORWARD]
        for steps in merge_lists(gpipe(4, 3).forward, [1, 0, 1, 0])
    )
    assert second == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)]
    assert first == [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1), (3, 2)]
