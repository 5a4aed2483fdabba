"""The messages are complete: each is a frozen dataclass with a number, and says what it does."""

from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import pytest

from lightning_hybrid.comm import protocol
from lightning_hybrid.comm import protocol as messages
from lightning_hybrid.comm.protocol import IN_FRAME, MESSAGES, Command, Message, Reduce
from lightning_hybrid.remote.proxy import RemoteKind

FAMILIES = {
    *(Message, Command, messages.StageMessage),
    *(protocol.NetworkCommand, protocol.CallCommand),
    protocol.OptimizerCommand,
}
DEFINED = {
    value
    for value in (*vars(protocol).values(), *vars(messages).values())
    if isinstance(value, type) and issubclass(value, Message) and value not in FAMILIES
}
COMMANDS = sorted((m for m in DEFINED if issubclass(m, Command)), key=lambda m: m.__name__)
CHANGES_GRADIENTS = {
    *("Backward", "Reduce", "TakeAverages"),
    *("ZeroGrad", "ClipNorm", "ClipValues", "Unscale"),
}
CHANGES_BUFFERS = {"Forward", "CommitEarlyForward", "SynchronizeBuffers"}
CHANGES_PARAMETERS = {"StepOptimizer"}
CHANGES = {
    RemoteKind.GRADIENT: CHANGES_GRADIENTS,
    RemoteKind.BUFFER: CHANGES_BUFFERS,
    RemoteKind.PARAMETER: CHANGES_PARAMETERS,
}


def test_every_message_has_one_number() -> None:
    assert set(MESSAGES) == DEFINED
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
def test_a_message_is_a_documented_frozen_dataclass(message: Any) -> None:
    assert is_dataclass(message)
    assert message.__dataclass_params__.frozen
    assert message.__doc__
    assert not message.__doc__.startswith(f"{message.__name__}(")  # that of `dataclass` itself


def test_a_message_cannot_be_changed() -> None:
    command: Any = Reduce(1)
    with pytest.raises(FrozenInstanceError):
        command.network = 2


@pytest.mark.parametrize("kind", RemoteKind)
def test_a_command_makes_stale_what_its_name_says(kind: RemoteKind) -> None:
    assert {c.__name__ for c in COMMANDS if kind in c.outdates} == CHANGES[kind]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.__name__)
def test_what_asks_is_answered(command: type[Command]) -> None:
    asks = command.__name__.startswith(("Give", "Name", "GradientNorm"))
    assert command.answered or not asks


def test_a_frame_has_room_for_the_integers_of_each_message() -> None:
    for message in (m for m in MESSAGES if m.in_frame):
        known: Any = message
        assert len([f for f in fields(known) if f.type in IN_FRAME]) <= 9
