"""Playing the tape gives what the operations have left, one storage at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deferring import build
from torch import Tensor, nn

from lightning_hybrid._trees import rebuild
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.initialization_tape import Tape
from lightning_hybrid.remote.own_memory import memory_for

CPU = torch.device("cpu")
STATUS = Path("/proc/self/status")
aten = torch.ops.aten


class Recorded:
    """Runs operations without memory, and takes them down.

    Attributes:
        tape: that they are on.
    """

    def __init__(self) -> None:
        self.tape = Tape(CPU)

    def __call__(
        self, function: Any, *given: Any, writes: Sequence[Tensor] = (), draws: bool = False
    ) -> Tensor:
        noted = rebuild(given, lambda v: self.tape.view(v) if isinstance(v, Tensor) else v)
        places = [self.tape.view(tensor) for tensor in writes]
        random = (torch.default_generator, torch.get_rng_state()) if draws else None
        makes = not any(isinstance(value, Tensor) for value in given)
        result = function(*given, **({"device": "meta"} if makes else {}))
        self.tape.record(function, (noted, {}), [result], places, random)
        return result


def at_once(function: Any, *given: Any, writes: Sequence[Tensor] = (), draws: bool = False) -> Any:
    """The same on ordinary tensors."""
    return function(*given)


def matrices(run: Callable[..., Any]) -> list[Tensor]:
    """Two storages, the second made of the first; and views, which share memory."""
    first = run(aten.arange.default, 12).view(3, 4)
    run(aten.add_.Tensor, first[1], 5, writes=[first[1]])
    second = run(aten.mul.Tensor, first, 2)
    run(aten.mul_.Tensor, first, second, writes=[first])
    run(aten.fill_.Scalar, first[:, 0], 7, writes=[first[:, 0]])
    run(aten.copy_.default, second[:, ::2], first[:, 1::2], writes=[second[:, ::2]])
    return [first, first[1:, ::2], second]


def test_each_tensor_has_what_the_operations_have_left() -> None:
    recorded = Recorded()
    wanted = matrices(at_once)
    views = [recorded.tape.view(tensor) for tensor in matrices(recorded)]
    for view, expected in zip(views, wanted):
        [found] = recorded.tape.real([view])
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    first, part, _ = recorded.tape.real(views)
    first.zero_()
    assert not part.any()  # the same memory


class Counted:
    """An operation that makes ones, and counts how often."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, size: int, device: str = "cpu") -> Tensor:
        self.runs += device != "meta"
        return torch.ones(size, device=device)


def test_only_what_a_storage_is_made_of_is_played() -> None:
    recorded, counts = Recorded(), [Counted() for _ in range(3)]
    first, second, _ = (recorded(count, 4) for count in counts)
    recorded(aten.add_.Tensor, first, second, writes=[first])
    [found] = recorded.tape.real([recorded.tape.view(first)])
    assert found.tolist() == [2.0] * 4
    assert [count.runs for count in counts] == [1, 1, 0]


@pytest.mark.parametrize(("whole", "runs"), [(True, 0), (False, 1)])
def test_what_is_overwritten_whole_is_not_made(whole: bool, runs: int) -> None:
    recorded, count = Recorded(), Counted()
    tensor = recorded(count, 4)
    part = tensor if whole else tensor[1:]
    recorded(aten.fill_.Scalar, part, 3, writes=[part])
    [found] = recorded.tape.real([recorded.tape.view(tensor)])
    assert found.tolist() == [3.0 if whole else 1.0, 3.0, 3.0, 3.0]
    assert count.runs == runs


def test_random_numbers_are_those_of_their_turn_and_the_generator_stays() -> None:
    torch.manual_seed(1)
    expected = [torch.empty(4).normal_(), torch.empty(4).normal_()]
    torch.manual_seed(1)
    recorded, tensors = Recorded(), []
    for _ in range(2):
        tensors.append(recorded(aten.empty.memory_format, [4]))
        recorded(aten.normal_.default, tensors[-1], writes=tensors[-1:], draws=True)
        torch.empty(4).normal_()  # whoever records lets the generator go on
    state = torch.get_rng_state()
    for tensor, wanted in reversed([*zip(tensors, expected)]):
        assert torch.equal(recorded.tape.real([recorded.tape.view(tensor)])[0], wanted)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_small_constant_is_what_it_was_and_a_large_one_must_stay_so() -> None:
    tape = Tape(CPU)
    small, large = torch.ones(3), torch.ones(2**20)
    views = [tape.view(tape.lift(tensor)) for tensor in (small, large)]
    small.zero_()
    found = tape.real(views)
    assert found[0].tolist() == [1, 1, 1]
    found[1].zero_()  # what was made is not the constant itself
    assert large.all()
    large.zero_()
    with pytest.raises(DeferredError, match=r"size \(1048576,\).*changed in place.*clone"):
        tape.real(views[1:])


def test_numbers_have_the_layout_that_the_network_was_promised() -> None:
    def transposed(device: str = "cpu") -> Tensor:
        """On the meta device it returns another layout than on the CPU, as some operations do."""
        made = torch.arange(6.0, device=device)
        return made.view(3, 2) if device == "meta" else made.view(2, 3).t()

    recorded = Recorded()
    [found] = recorded.tape.real([recorded.tape.view(recorded(transposed))])
    assert found.stride() == (2, 1)
    assert found.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_is_written_while_marking_is_marked() -> None:
    recorded = Recorded()
    one, other = (recorded(aten.ones.default, [3]) for _ in range(2))
    recorded.tape.marking = True
    recorded(aten.add_.Tensor, one[1:], 1, writes=[one[1:]])
    recorded.tape.marking = False
    recorded(aten.add_.Tensor, other, 1, writes=[other])
    assert [recorded.tape.is_marked(tensor) for tensor in (one, one[0], other)] == [
        *(True, True, False)
    ]


def test_a_tape_knows_its_own_tensors_alone() -> None:
    recorded = Recorded()
    mine = recorded(aten.ones.default, [3])
    assert recorded.tape.knows(mine[1:])
    assert not recorded.tape.knows(torch.ones(3, device="meta"))
    assert not recorded.tape.knows(torch.ones(3))


@pytest.mark.parametrize("size", [0, 12, 2**20, 2**20 + 4])
def test_memory_is_as_large_as_it_is_wanted_and_can_be_written(size: int) -> None:
    storage = memory_for(size, CPU)
    assert storage.nbytes() == size
    assert torch.empty(0).set_(storage).fill_(3.0).eq(3).all()
    assert memory_for(size, torch.device("meta")).device.type == "meta"


@pytest.mark.skipif(not STATUS.exists(), reason="Linux's account of a process is not there")
def test_weights_that_are_drawn_and_dropped_leave_the_process() -> None:
    before = own_bytes()
    network, _ = build(
        lambda: nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
    )  # 256 MiB
    with torch.no_grad():
        network(torch.zeros(1, 2048))  # draws each of them again
    assert own_bytes() - before < 64 * 2**20


def own_bytes() -> int:
    """The memory of this process, without files."""
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024
