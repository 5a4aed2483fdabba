"""What a script is told where a collective of Lightning or torchmetrics has lost a peer."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.errors import RemoteError
from lightning_hybrid.strategy.launcher import _raise_first

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] {} [127.0.0.1]:40414\n#0 c10::Error"


@pytest.fixture(autouse=True)
def _hook() -> Iterator[None]:
    before = sys.excepthook
    yield
    sys.excepthook = before


def raised(error: Exception) -> tuple[pytest.ExceptionInfo[Exception], list[BaseException]]:
    """What comes of an error that no other rank has reported, and what was reported of it."""
    reported: list[BaseException] = []
    strategy: Any = SimpleNamespace(fail=reported.append, coordinates=Coordinates(0, 2, 1))
    with pytest.raises(Exception) as found:  # noqa: PT011  the kind is looked at by the tests
        _raise_first(strategy, error)
    return found, reported


@pytest.mark.parametrize(
    ("text", "late"), [("Connection closed by peer", False), ("Timed out waiting", True)]
)
def test_a_lost_peer_is_told_in_our_words(text: str, late: bool) -> None:
    found, [reported] = raised(RuntimeError(GLOO.format(text)))
    assert isinstance(found.value, RemoteError)
    assert str(found.value).startswith("Lost a rank of another replica. It ")
    assert "c10::Error" not in str(found.value)
    assert isinstance(reported, ConnectionLost)
    assert reported.late is late


def test_an_error_of_the_users_stays_what_it_is() -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    found, [reported] = raised(error)
    assert found.value is error
    assert reported is error


def test_an_error_that_nobody_catches_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = raised(RuntimeError(GLOO.format("Broken pipe")))
    sys.excepthook(type(found.value), found.value, None)
    assert capsys.readouterr().err.startswith("rank 0 (driver, replica 0, stage 0) ends")
