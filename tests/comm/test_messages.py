"""What stages and workers say to each other arrives as it was said."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from ranks import together

from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.protocol import (
    Answer,
    GradientPattern,
    Header,
    Message,
    StageMessage,
    Status,
)
from lightning_hybrid.comm.tensor_specs import TensorSpec
from lightning_hybrid.comm.travelling_errors import Failure

FAILURE = Failure.of(ValueError("on purpose"), "rank 1")
SPEC = TensorSpec.of(torch.zeros(3, 4, dtype=torch.float64).T)
SAID: list[Message] = [
    *(Header(), Header([]), Header([SPEC, SPEC], uses_rng=True)),
    *(Status(), Status(FAILURE)),
    *(GradientPattern([]), GradientPattern([True, False])),
    *(Answer(), Answer(value=False), Answer(FAILURE, {"norm": 2.0})),
]


@pytest.mark.parametrize("message", SAID, ids=repr)
def test_a_message_arrives_as_it_was_said(wires: Callable[..., Any], message: Message) -> None:
    here, there = (Channel(wire) for wire in wires().pair())

    def speak() -> None:
        here.send(message)
        here.flush()

    _, found = together(speak, lambda: there.receive(type(message)))
    for field in fields(message):  # type: ignore[arg-type] # all are dataclasses
        if field.name != "tensors":
            assert str(getattr(found, field.name)) == str(getattr(message, field.name))


def test_every_word_is_said_here() -> None:
    assert {type(message) for message in SAID} == {*StageMessage.__subclasses__(), Answer}
