"""From which worker tensors come, and to which ones changes go."""

import pytest
import torch
from crew import Crew

from lightning_hybrid.comm.protocol import (
    Answer,
    ClearGradients,
    GiveGradients,
    GiveWeights,
    LendTensors,
    NameGradients,
    TakeGradients,
    TakeLentGradients,
    TakeWeights,
)
from lightning_hybrid.driver.ownership import Ownership
from lightning_hybrid.remote.proxy import RemoteKind

ONE, TWO = torch.ones(1), torch.full((2,), 2.0)


@pytest.fixture
def unaveraged() -> set[int]:
    return set()


@pytest.fixture
def ownership(crew: Crew, unaveraged: set[int]) -> Ownership:
    made = Ownership(crew.workers, unaveraged)
    assert not made.any_network
    made.add(0, {1: ("a", "mask"), 2: ("b", "mask")})
    made.add(1, {1: ("c",), 2: ()})
    return made


@pytest.mark.parametrize(
    ("kind", "command"), [(RemoteKind.PARAMETER, GiveWeights), (RemoteKind.GRADIENT, GiveGradients)]
)
def test_each_worker_is_asked_once_for_what_it_owns(
    crew: Crew, ownership: Ownership, kind: RemoteKind, command: type
) -> None:
    crew.answer(1, Answer(tensors=[("a", ONE), ("c", TWO)]))
    crew.answer(2, Answer(tensors=[("b", TWO)]))
    values = ownership.give(kind, ["a", "b", "c"])
    torch.testing.assert_close(values, {"a": ONE, "c": TWO, "b": TWO})
    assert crew.heard(1) == command(["a", "c"])
    assert crew.heard(2) == command(["b"])


def test_a_constant_of_several_workers_changes_on_all_of_them(
    crew: Crew, ownership: Ownership
) -> None:
    ownership.take(RemoteKind.BUFFER, {"mask": ONE, "a": TWO})
    first, second = crew.heard(1), crew.heard(2)
    assert isinstance(first, TakeWeights)
    assert isinstance(second, TakeWeights)
    assert sorted(name for name, _ in first.tensors) == ["a", "mask"]
    assert [name for name, _ in second.tensors] == ["mask"]


def test_networks_whose_gradients_are_added_to_are_averaged_again(
    crew: Crew, ownership: Ownership, unaveraged: set[int]
) -> None:
    ownership.take(RemoteKind.GRADIENT, {"b": TWO})
    assert unaveraged == set()
    ownership.take(RemoteKind.GRADIENT, {"c": TWO}, add=True)
    assert unaveraged == {1}
    command = crew.heard(1)
    assert isinstance(command, TakeGradients)
    assert command.add


def test_gradients_are_cleared_and_found_where_they_are(crew: Crew, ownership: Ownership) -> None:
    ownership.clear_gradients(["c", "b"])
    assert crew.heard(1) == ClearGradients(["c"])
    assert crew.heard(2) == ClearGradients(["b"])
    crew.answer(1, Answer(value={"a": True}))
    crew.answer(2, Answer(value={"b": True}))
    assert ownership.gradient_names() == {"a", "b"}
    assert crew.heard(1) == NameGradients()


def test_a_worker_owns_tensors_of_all_networks(ownership: Ownership) -> None:
    assert ownership.any_network
    assert [ownership.tensors_of(rank) for rank in (1, 2)] == [["a", "mask", "c"], ["b", "mask"]]


@pytest.mark.parametrize("kind", [RemoteKind.PARAMETER, RemoteKind.GRADIENT])
def test_after_an_error_in_an_exchange_workers_are_not_asked(
    crew: Crew, ownership: Ownership, kind: RemoteKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for its tensors, and would hear no question."""

    def fails(_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(crew.workers.lines[1], "to_driver", fails)
    with pytest.raises(torch.OutOfMemoryError):
        ownership.bring(kind, {"a": torch.zeros(2)})
    assert crew.heard(1) == LendTensors(["a"], kind is RemoteKind.GRADIENT, [torch.float32])
    assert not crew.workers.in_step


@pytest.fixture
def lines(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What goes from device to device between the driver and worker 1."""
    sent: list[torch.Tensor] = []
    for way in ("to_driver", "to_owner"):
        monkeypatch.setattr(crew.workers.lines[1], way, sent.extend)
    return sent


def test_what_is_lent_in_each_step_is_named_only_once_another_type_is_wanted(
    crew: Crew, ownership: Ownership, lines: list[torch.Tensor]
) -> None:
    lent = {"a": torch.zeros(2), "c": torch.zeros(3)}
    ownership.lend(1, lent)
    assert ownership.bring_lent() == ["a", "c"]
    assert crew.heard(1) == LendTensors()
    lent["c"].data = lent["c"].double()  # by code of the user's, which the worker does not hear of
    ownership.bring_lent()
    assert crew.heard(1) == LendTensors(["a", "c"], types=[torch.float32, torch.float64])
    assert [tensor.data_ptr() for tensor in lines[2:]] == [t.data_ptr() for t in lent.values()]


def test_gradients_of_lent_weights_go_back_in_the_owner_s_type_if_all_are_dense(
    crew: Crew, ownership: Ownership, lines: list[torch.Tensor]
) -> None:
    ownership.lend(1, {"a": torch.zeros(2), "c": torch.zeros(2)})
    ownership.take(RemoteKind.GRADIENT, {"a": TWO, "c": TWO.double(), "b": TWO}, add=True)
    assert crew.heard(1) == TakeLentGradients()
    assert [tensor.dtype for tensor in lines] == [torch.float32] * 2
    for others in ({"a": TWO}, {"a": TWO, "c": torch.eye(2).to_sparse()}):
        ownership.take(RemoteKind.GRADIENT, others, add=True)
        command = crew.heard(1)
        assert isinstance(command, TakeGradients)
        assert [name for name, _ in command.tensors] == [*others]
