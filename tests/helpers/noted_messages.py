"""What the messages of a replica carry, as a test sees it."""

from typing import Any

import pytest

from lightning_hybrid.comm.message_channel import Channel, encode


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Of each message from here on its name, its pickled bytes and its tensors."""
    told: list[tuple[str, int, int]] = []
    send = Channel.send

    def note(channel: Channel, message: Any, **how: Any) -> None:
        _, pickled, tensors = encode(message)
        told.append((type(message).__name__, len(pickled), len(tensors)))
        send(channel, message, **how)

    monkeypatch.setattr(Channel, "send", note)
    return told
