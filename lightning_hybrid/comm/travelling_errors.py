"""The failure of one rank, in a form that every other rank can raise.

``except MyError`` around ``trainer.fit`` must catch on all ranks what was raised on one. So an
exception travels beside its text: pickled if it survives that, else as its class and arguments. If
the class is made inside of a function, and nobody can import it, its name travels, and the nearest
of its bases that can be imported: a rank that does not have the class makes one of that base. The
cause of all exceptions that came from elsewhere is a :class:`RemoteError` with the traceback of the
rank that raised them; what cannot travel at all is raised as that.

How the backends say that a peer is gone, or does not answer: by the text of an error alone.

gloo raises a plain ``RuntimeError``, for a lost connection as for a wrong shape. NCCL raises
``DistBackendError`` for everything, and its watchdog names what it has ended. The texts are those
of torch 2.13; ``tests/comm/test_comm_lost_peers.py`` provokes gloo's.
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
    """What one rank tells the others of its failure.

    Attributes:
        text: which rank failed, and its traceback.
        headline: class and message of the exception, equal where ranks have raised alike.
        packed: the exception in base64; empty if it cannot travel.
    """

    text: str
    headline: str = ""
    packed: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: str, where: str = "") -> "Failure":
        """Describe ``error``.

        Args:
            error: raised on this rank, or brought from another one by :meth:`exception`.
            rank: this rank.
            where: on it, if there is more than one possibility.
        """
        kind = type(error)
        headline = f"{kind.__module__}.{kind.__qualname__}: {error}"
        if (text := told_text(error)) is None:
            trace = "".join(traceback.format_exception(error))
            text = f"{' '.join((rank, 'failed', where)).strip()}:\n{trace}"
        return cls(text, headline, base64.b64encode(_pack(error)).decode())

    @classmethod
    def from_json(cls, data: str) -> "Failure":
        """The other end of :meth:`to_json`."""
        return cls(**json.loads(data))

    def to_json(self) -> str:
        """As text, for the store."""
        return json.dumps(asdict(self))

    def exception(self) -> Exception:
        """The exception for this rank to raise, caused by a :class:`RemoteError` with the text."""
        cause = RemoteError(self.text)
        if not self.packed:
            return cause
        error: Exception = cause
        with suppress(Exception):  # a class may refuse to be made again in any way it likes
            error = _unpack(base64.b64decode(self.packed))
        if error is cause or isinstance(error, _NotKnownHere):
            name = self.headline.partition(": ")[0]
            cause.add_note(
                f"The class {name} cannot be sent to this rank, where `except` does not catch it "
                "by this name: define it at the top of a module, which every rank imports."
            )
        if error is not cause:
            error.__cause__ = cause
        return error


def told_text(error: BaseException) -> str | None:
    """The text of a failure that another rank has told this one; ``None``: it is this rank's."""
    # what was raised on its behalf has it as its cause
    for told in (error, error.__cause__):
        if type(told) is RemoteError:
            return str(told)
    return None


def raised(text: str) -> str:
    """The line of a traceback that names the error and begins its message; else the last line."""
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    return next((line for line in after if line[:1].strip()), lines[-1])


def _pack(error: BaseException) -> bytes:
    """Empty: it cannot travel. What ends a process (Ctrl-C) ends that process alone."""
    if not isinstance(error, Exception) or isinstance(error, RemoteError):
        return b""
    # one attribute that cannot travel must not keep the others
    state = {name: value for name, value in vars(error).items() if _travels(value)}
    kind = type(error)
    name = (kind.__module__, kind.__qualname__, next(filter(_travels, kind.__mro__[1:])))
    for value in (
        error,
        (kind, error.args, state),
        (kind, (str(error),), {}),
        (name, error.args, state),
        (name, (str(error),), {}),
    ):
        # Python makes a pickled exception by calling its class with `args`, which fails for
        # classes with parameters of their own
        if _travels(value) and isinstance(_unpack(data := pickle.dumps(value)), type(error)):
            return data
    return b""


def _travels(value: Any) -> bool:
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:  # an object may refuse to be pickled in any way it likes
        return False
    return len(data) <= _LIMIT_BYTES


def _unpack(data: bytes) -> Exception:
    value: Any = pickle.loads(data)
    if isinstance(value, Exception):
        return value
    kind, arguments, state = value
    if isinstance(kind, tuple):
        kind = _class_made_here(*kind)
    # `__init__` may want other arguments than those that it has left in `args`
    error: Exception = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(state)
    return error


class _NotKnownHere:
    """A base of classes that stand in for those of other ranks."""


def _class_made_here(module: str, name: str, base: type[Exception]) -> type[Exception]:
    """The last class of exceptions of this name that code of this process has made, or a new one.

    Args:
        module: where it was made.
        name: of the class, with those that it stands in.
        base: of the new one.
    """
    found, below = list[type[Exception]](), [Exception]
    while below:
        kind = below.pop()
        below += kind.__subclasses__()
        if (kind.__module__, kind.__qualname__) == (module, name):
            found.append(kind)
    if found:
        return found[0]
    attributes = {"__module__": module, "__qualname__": name}
    return type(name.rpartition(".")[2], (base, _NotKnownHere), attributes)


_GONE = (
    # gloo
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    # NCCL
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
)
_LATE = (
    # gloo; the second is what the other transfers of a pair say then
    "Timed out waiting",
    "Application timeout",
    # NCCL's watchdog
    "Watchdog caught collective operation timeout",
    "Some NCCL operations have failed or timed out",
)


def is_gone(error: BaseException) -> bool:
    """Whether a backend says with ``error`` that the connection to a peer is lost."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE)


def is_late(error: BaseException) -> bool:
    """Whether a backend says with ``error`` that it gave up waiting."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LATE)
