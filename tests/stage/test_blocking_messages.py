"""No order of a rank needs a buffer: a send or receive may block until the other end is there.

So NCCL behaves with ``CUDA_LAUNCH_BLOCKING=1``, and, for what waits for a send, with messages that
its buffers do not hold.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipelines import PLACEMENTS, Pipeline, chain, gradients_of, one_device, slices, train_step

from lightning_hybrid.comm.activation_links import copies_of, stages_of
from lightning_hybrid.comm.protocol import Placement
from lightning_hybrid.schedules import (
    INSIDE,
    SCHEDULES,
    STREAMED,
    Instruction,
    InstructionKind,
    loop_order,
)
from lightning_hybrid.stage.rank_stages import lists_of

Lists = list[list[tuple[int, InstructionKind, int]]]
"""By rank its instructions: (stage, kind, micro-batch)."""
TAKES = {
    InstructionKind.SEND_INPUT: InstructionKind.EXPECT_ACTIVATION,
    InstructionKind.SEND_ACTIVATION: InstructionKind.EXPECT_ACTIVATION,
    InstructionKind.SEND_GRADIENT: InstructionKind.EXPECT_GRADIENT,
}


class Blocking:
    """Ranks each of which blocks at a message until the other end is there too.

    Copies of a stage average their gradients in the computation behind a REDUCE, where they wait
    for each other.
    """

    def __init__(self, lists: Lists, placement: Placement) -> None:
        self.ranks = [copies_of(device) for device in placement.devices]
        self.todo = [deque(_averaging(steps)) for steps in lists]
        self.begun: set[tuple[int, InstructionKind, int]] = set()

    def run(self) -> None:
        while any(self.goes(rank) for rank, steps in enumerate(self.todo) if steps):
            pass
        left = [steps[0] for steps in self.todo if steps]
        assert not left, f"deadlock: {left}"
        assert not self.begun, "what was sent is taken"

    def goes(self, rank: int) -> bool:
        """Whether a rank can take its next step, which it then does."""
        stage, kind, microbatch = step = self.todo[rank][0]
        if kind is InstructionKind.REDUCE:
            copies = self.ranks[stage]
            return self.together(copies, [step[:2]] * len(copies))
        if kind in TAKES.values():
            return False  # the sender looks for it
        if kind in TAKES:
            peer = Instruction(kind, microbatch).peer(stage, len(self.ranks))
            other = self.ranks[peer][microbatch % len(self.ranks[peer])]
            expected = peer, TAKES[kind], microbatch
            self.begun.add(expected)
            if other != rank:
                return self.together((rank, other), (step, expected))
        elif kind.is_receive:
            expects = "expect_" + str(kind).removeprefix("receive_").removeprefix("input_")
            self.begun.remove((stage, InstructionKind(expects), microbatch))
        self.todo[rank].popleft()
        return True

    def together(self, ranks: Sequence[int], steps: Sequence[tuple[Any, ...]]) -> bool:
        """Whether each of these ranks is at its step; then all take it."""
        at = [self.todo[rank][0] if self.todo[rank] else () for rank in ranks]
        if any(here[: len(step)] != step for here, step in zip(at, steps)):
            return False
        for rank in ranks:
            self.todo[rank].popleft()
        return True


def _averaging(
    steps: Sequence[tuple[int, InstructionKind, int]],
) -> list[tuple[int, InstructionKind, int]]:
    """A rank waits for other copies in the computation that follows a REDUCE, if one does."""
    found = list(steps)
    for place, step in enumerate(steps):
        if step[1] is InstructionKind.REDUCE:
            after = [n for n, other in enumerate(steps) if n > place and other[1].computes]
            found.insert(after[0] if after else place, found.pop(place))
    return found


def lists_of_all(placement: Placement, microbatches: int, *how: Any) -> tuple[Lists, Lists]:
    """The forward and the backward lists of all ranks, as engines run them."""
    found: tuple[Lists, Lists] = [], []
    for rank in range(1 + max(map(max, map(copies_of, placement.devices)))):
        own = stages_of(placement.devices, rank)
        for lists, todo in zip(found, lists_of(placement, rank, microbatches, *how)):
            lists.append([(own[index], kind, m) for index, kind, m in todo])
    return found


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Stages on any ranks, the last one on the driver's."""
    name = draw(st.sampled_from([*SCHEDULES]))
    count = draw(st.integers(1, 6))
    devices = draw(st.lists(st.sampled_from(range(count)), min_size=count, max_size=count))
    split = draw(st.sets(st.sampled_from(range(1, count)))) if count > 1 else ()
    named = {device: number for number, device in enumerate(dict.fromkeys(reversed(devices)))}
    return Placement(tuple(named[d] for d in devices), (), name, tuple(split))


@given(placements(), st.integers(1, 9), st.booleans())
def test_with_one_copy_of_a_stage(
    placement: Placement, microbatches: int, input_gradient: bool
) -> None:
    for lists in lists_of_all(placement, microbatches, input_gradient):
        Blocking(lists, placement).run()


ORDERS = st.sampled_from(["rising", "falling"])


@given(placements(), st.integers(1, 9), ORDERS)
def test_with_backwards_inside_of_a_call(
    placement: Placement, microbatches: int, inside: str
) -> None:
    """Stages on any ranks, some of which are split."""
    placement = replace(placement, schedule=INSIDE)
    forward, _ = lists_of_all(placement, microbatches, False, inside)
    Blocking(forward, placement).run()


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 13), ORDERS)
def test_with_backwards_inside_of_a_call_in_a_loop(
    devices: int, rounds: int, microbatches: int, inside: str
) -> None:
    placement = Placement(loop_order(devices, rounds), (), INSIDE)
    forward, _ = lists_of_all(placement, microbatches, False, inside)
    Blocking(forward, placement).run()


COPIES: list[Any] = [
    *(((1, 2), 0), ((1, 2, 3), 0), (1, (2, 3), 0), ((1, 2), (3, 4), 0), ((1, 2), (3, 4, 5), 6, 0)),
    *(((1, 0), 0), ((1, 2, 0), 0), (1, (2, 0), 0), ((1, 2), (3, 0), 0), (1, 2, (3, 0), 0)),
]


@pytest.mark.parametrize("devices", COPIES)
@pytest.mark.parametrize("name", ["gpipe", "zero_bubble"])
def test_with_copies_of_stages(devices: Any, name: str) -> None:
    placement = Placement(devices, (), name, tuple(range(1, len(devices))))
    for microbatches, input_gradient in product(range(1, 9), (False, True)):
        for lists in lists_of_all(placement, microbatches, input_gradient):
            Blocking(lists, placement).run()


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_it_is_the_order_that_does_it(name: str) -> None:
    """Receives that begin where their tensors are needed hang behind sends that block."""
    placement = Placement((1, 2, 0), (), name)
    how: Any = (False, "rising") if name == INSIDE else (False,)
    forward, _ = lists_of_all(placement, 4, *how)
    late: Lists = []
    for steps in forward:
        late.append([])
        for stage, kind, microbatch in steps:
            if kind in TAKES.values():
                continue
            if kind.is_receive:
                expects = InstructionKind(str(kind).replace("receive", "expect"))
                late[-1].append((stage, expects, microbatch))
            late[-1].append((stage, kind, microbatch))
    inputs = [step for step in late[0] if step[1] is InstructionKind.SEND_INPUT]
    late[0] = [*inputs, *(step for step in late[0] if step not in inputs)]
    with pytest.raises(AssertionError, match="deadlock"):
        Blocking(late, placement).run()


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in STREAMED])
@pytest.mark.parametrize("devices", PLACEMENTS)
def test_engines_come_to_the_numbers_of_one_device(name: str, devices: tuple[int, ...]) -> None:
    network = chain(len(devices))
    reference = chain(len(devices))
    split = range(1, len(devices)) if name == "zero_bubble" else ()
    pipeline = Pipeline(network, devices, timeout_s=20, schedule=name, split=tuple(split))
    parts, theirs = slices(6, requires_grad=True), slices(6, requires_grad=True)
    for _ in range(2):  # with headers, then without
        outputs, gradients = train_step(pipeline, parts, input_gradient=True)
        expected = one_device(reference, theirs)
        sum(output.square().sum() for output in expected).backward()  # type: ignore[union-attr]
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected))
    for found, wanted in zip(gradients_of(network), gradients_of(reference)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    if len(set(devices)) == len(devices):
        for (found,), (value,) in zip(gradients, theirs):
            torch.testing.assert_close(2 * found, value.grad, rtol=1e-12, atol=1e-12)
