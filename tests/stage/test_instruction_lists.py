"""What a rank does is what the schedule says of its stages."""

import pytest

from lightning_hybrid.comm.protocol import Placement
from lightning_hybrid.schedules import InstructionKind
from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.stage.rank_stages import lists_of


def spelled(todo: tuple[tuple[int, str, int], ...]) -> list[str]:
    return [f"{stage} {name} {microbatch}" for stage, name, microbatch in todo]


def test_of_two_stages_on_two_ranks() -> None:
    """A receive begins before the computation in front of the one that needs it."""
    forward, backward = lists_of(Placement((1, 0), (), "gpipe"), 1, 2, True)
    assert spelled(forward) == [
        *("0 expect_activation 0", "0 expect_activation 1"),
        *("0 receive_activation 0", "0 forward 0", "0 send_activation 0"),
        *("0 receive_activation 1", "0 forward 1", "0 send_activation 1"),
    ]
    assert spelled(backward) == [
        *("0 expect_gradient 1", "0 expect_gradient 0"),
        *("0 receive_gradient 1", "0 backward 1", "0 send_gradient 1"),
        *("0 receive_gradient 0", "0 reduce 0", "0 backward 0", "0 send_gradient 0"),
    ]


@pytest.mark.parametrize("devices", [(1, 0), (1, 2, 3, 0)])
def test_two_receives_at_most_are_under_way(devices: tuple[int, ...]) -> None:
    """And as many inputs as stage 0 has not taken, so that memory does not grow with a batch."""
    for rank in devices:
        for todo in lists_of(Placement(devices, (), "gpipe"), rank, 32, False):
            begun, most = 0, 0
            for _, kind, _ in todo:
                begun += ("expect" in kind) - kind.is_receive
                most = max(most, begun)
            assert most <= 2
    inputs = [kind for _, kind, _ in lists_of(Placement(devices, (), "gpipe"), 0, 32, False)[0]]
    assert inputs[: inputs.index(InstructionKind.FORWARD)].count(
        InstructionKind.SEND_INPUT
    ) == 2 * len(devices)


def here(kind: InstructionKind) -> bool:
    """Whether its place is that of the schedule: not that of inputs, and the begin of receives."""
    return kind not in (
        InstructionKind.SEND_INPUT,
        InstructionKind.EXPECT_ACTIVATION,
        InstructionKind.EXPECT_GRADIENT,
    )


@pytest.mark.parametrize("devices", [(1, 0), (2, 1, 0), (1, 2, 1, 0), (0, 1, 0), (0, 0)])
@pytest.mark.parametrize("input_gradient", [False, True])
def test_each_stage_does_on_its_rank_what_it_would_do_alone(
    devices: tuple[int, ...], input_gradient: bool
) -> None:
    schedule = gpipe(len(devices), 3, input_gradient=input_gradient)
    for device in set(devices):
        own = [stage for stage, owner in enumerate(devices) if owner == device]
        todo = lists_of(Placement(devices, (), "gpipe"), device, 3, input_gradient)
        for lists, found in zip((schedule.forward, schedule.backward), todo):
            assert {index for index, _, _ in found} == {*range(len(own))}
            for index, stage in enumerate(own):
                steps = [(str(kind), m) for which, kind, m in found if which == index if here(kind)]
                assert steps == [
                    (str(step.kind), step.microbatch) for step in lists[stage] if here(step.kind)
                ]


def test_they_are_made_once_for_each_number_of_micro_batches() -> None:
    placement = Placement((1, 0), (), "gpipe")
    assert lists_of(placement, 0, 4, False) is lists_of(placement, 0, 4, False)
