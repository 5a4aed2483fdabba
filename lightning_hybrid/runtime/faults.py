"""The first error of a run, on every rank: who fails writes it down, who follows reads it."""

import time
from contextlib import suppress
from datetime import timedelta
from threading import Thread

from lightning_hybrid.errors import RemoteError
from lightning_hybrid.runtime.mesh import Mesh
from lightning_hybrid.runtime.transport import ConnectionLost, meet

_KEY = "fault"
_WITNESS_DELAY_S = 0.5
_MEETING_S, _READING_S = 2.0, 0.2
_STORE_TIMEOUT = timedelta(seconds=3)  # its host may be the rank that died


def first_fault(mesh: Mesh | None, error: BaseException, text: str) -> str | None:
    """Report a failure of this rank.

    Args:
        mesh: the groups; ``None`` before there are any.
        error: what was raised.
        text: how to report it if it is the first.

    Returns:
        What another rank has failed with before, or told this one; ``None``: this is the first.
    """
    told = isinstance(error, RemoteError) and not isinstance(error, ConnectionLost)
    if told:
        text = str(error)
    elif is_hearsay(error):
        time.sleep(_WITNESS_DELAY_S)
    if mesh is not None:
        try:
            mesh.store.set_timeout(_STORE_TIMEOUT)
            first: str = mesh.store.compare_set(_KEY, "", text).decode()
        except RuntimeError:
            first = text
        if first != text:
            return first
    return text if told else None


def read_fault(mesh: Mesh) -> str:
    """What the rank that failed first has reported."""
    text: str = mesh.store.get(_KEY).decode()
    return text


def say_at_next_meeting(mesh: Mesh | None) -> None:
    """Before or after a run all ranks meet now and then: tell those who wait there already.

    Who comes later finds this rank gone.
    """
    if mesh is None:
        return
    teller = Thread(target=_tell, args=(mesh,), daemon=True)
    teller.start()
    teller.join(_MEETING_S)
    time.sleep(_READING_S)  # this rank may host the store that they read now


def _tell(mesh: Mesh) -> None:
    with suppress(ConnectionLost):
        meet(mesh.world, failed=True)


def is_loss(error: BaseException) -> bool:
    """Whether ``error`` only says that a peer is gone (from us, or from gloo under Lightning)."""
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, ConnectionLost) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in gone)
    )


def is_hearsay(error: BaseException) -> bool:
    """Whether somebody is gone and this rank cannot tell who: a direct neighbour can."""
    named = isinstance(error, ConnectionLost) and "a rank of" not in str(error)
    return is_loss(error) and not named
