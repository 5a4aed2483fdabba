"""Send the failure of one rank to the others, and recognize the errors of lost peers.

``except MyError`` around ``trainer.fit`` must catch on all ranks what was raised on one. So the
exception is sent beside its text: pickled if that works, else as its class and arguments. The cause
of an exception from another rank is a :class:`RemoteError` with that rank's traceback; if the
exception cannot be sent (its class was made inside of a function, and cannot be imported), the
:class:`RemoteError` itself is raised.

Only the text of a backend's error tells that a peer is gone, or does not answer. gloo raises a
plain ``RuntimeError``, for a lost connection as for a wrong shape. NCCL raises ``DistBackendError``
for everything, and the errors of its watchdog say what it has ended. The texts are those of torch
2.13; ``tests/comm/test_comm_lost_peers.py`` provokes gloo's.
"""

import base64
import json
import pickle
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from lightning_hybrid.errors import RemoteError

_LIMIT_BYTES = 2**20  # an exception may hold a batch, which nobody needs on other ranks


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, as it is sent to other ranks.

    Attributes:
        text: which rank failed, and its traceback.
        headline: class and message of the exception. Ranks that raise equal exceptions have equal
            headlines.
        packed: the exception, pickled, in base64; empty if it cannot be sent.
    """

    text: str
    headline: str = ""
    packed: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: str, where: str = "") -> "Failure":
        """Make the failure for ``error``.

        Args:
            error: an exception raised on this rank, or one that :meth:`exception` has made of
                another rank's failure.
            rank: name of this rank, for the text.
            where: where in the rank it failed (``"in stage 2"``), for the text; may be empty.
        """
        kind = type(error)
        headline = f"{kind.__module__}.{kind.__qualname__}: {error}"
        if (text := told_text(error)) is None:
            trace = "".join(traceback.format_exception(error))
            text = f"{' '.join((rank, 'failed', where)).strip()}:\n{trace}"
        return cls(text, headline, base64.b64encode(_pack(error)).decode())

    @classmethod
    def from_json(cls, data: str) -> "Failure":
        """Read what :meth:`to_json` has written."""
        return cls(**json.loads(data))

    def to_json(self) -> str:
        """Write the failure as JSON text, for the store."""
        return json.dumps(asdict(self))

    def exception(self) -> Exception:
        """Make the exception to raise on this rank.

        It is the exception that was sent, with a :class:`RemoteError` as its cause; if none was
        sent, the :class:`RemoteError`, whose message is ``text``.
        """
        cause = RemoteError(self.text)
        if self.packed:
            with suppress(Exception):  # the class may raise anything when its exception is rebuilt
                error = _unpack(base64.b64decode(self.packed))
                error.__cause__ = cause
                return error
        return cause


def told_text(error: BaseException) -> str | None:
    """The text of the other rank's failure that ``error`` stands for.

    Returns:
        The message of the :class:`RemoteError` that ``error`` is, or that is its cause; ``None``:
        the error is this rank's own.
    """
    for told in (error, error.__cause__):
        if type(told) is RemoteError:
            return str(told)
    return None


def raised(text: str) -> str:
    """Return the line of a traceback's text with the error's class and message; else its last line.

    Args:
        text: the text, which must not be empty.
    """
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    return next((line for line in after if line[:1].strip()), lines[-1])


def _pack(error: BaseException) -> bytes:
    """Pickle an exception for other ranks; returns ``b""`` if it cannot be sent.

    Attributes that cannot be pickled are left out. Exceptions that end a process
    (``KeyboardInterrupt``) are not sent: they end that process alone.
    """
    if not isinstance(error, Exception) or isinstance(error, RemoteError):
        return b""
    # leave out attributes that cannot be pickled
    state = {name: value for name, value in vars(error).items() if _travels(value)}
    kind = type(error)
    for value in (error, (kind, error.args, state), (kind, (str(error),), {})):
        # Python makes a pickled exception by calling its class with `args`, which fails for
        # classes with parameters of their own
        if _travels(value) and isinstance(_unpack(data := pickle.dumps(value)), type(error)):
            return data
    return b""


def _travels(value: Any) -> bool:
    """Whether a value can be pickled and unpickled, and is small enough to be sent."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:  # objects may raise anything when they are pickled
        return False
    return len(data) <= _LIMIT_BYTES


def _unpack(data: bytes) -> Exception:
    value: Any = pickle.loads(data)
    if isinstance(value, Exception):
        return value
    kind, arguments, state = value
    # not by calling the class: `__init__` may have other parameters than `args` has values
    error: Exception = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(state)
    return error


_GONE = (
    # gloo
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    # the store, whose host, rank 0, has ended
    "Connection was likely closed",
    # NCCL
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
)
_LATE = (
    # gloo; the second is the error of further transfers of the same pair of ranks
    "Timed out waiting",
    "Application timeout",
    # NCCL's watchdog
    "Watchdog caught collective operation timeout",
    "Some NCCL operations have failed or timed out",
)


def is_gone(error: BaseException) -> bool:
    """Whether ``error`` is a backend's error which says that the connection to a peer is lost."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE)


def is_late(error: BaseException) -> bool:
    """Whether ``error`` is a backend's error which says that a peer has not answered in time."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LATE)
