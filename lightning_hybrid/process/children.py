"""The processes that a script starts as ranks: notice those that ended, and leave none behind.

Once all ranks have met, a closed connection tells that a rank is gone. Before that, a started rank
would wait for the store of a script that was killed, and while it imports it cannot check. So a
shell beside the script watches it (:func:`keep_ranks`).
"""

import subprocess
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import ClassVar

from lightning_hybrid.errors import RemoteError
from lightning_hybrid.process.watchdogs import GRACE_S

# waits for a line from the process that has started it; if its pipe closes instead, kills the ranks
# (and only then says so: nobody may read that any more, and to write would end it)
_KEEPER = (
    'read -r met || { kill -9 "$@" 2>/dev/null; echo "Ranks that have not met yet end (processes '
    '$*): the process that has started them is gone." >&2; }'
)
# gives each of its arguments, the numbers of processes, some seconds to end
_LATER = (
    f"seconds=0; for rank; do while kill -0 $rank && [ $seconds -lt {GRACE_S:.0f} ]; do sleep 1; "
    "seconds=$((seconds + 1)); done; kill -9 $rank; done"
)


class Children:
    """The ranks that this process has started, as attributes of the class, for all its Trainers.

    Attributes:
        processes: the started processes, by local rank, from local rank 1 on.
        lose: called during a run with the local ranks of processes that have ended with an error;
            returns the ranks that the run goes on without, or ``None``: the run ends. ``None``
            instead of a function: no run is under way.
        name_of: returns the name of a rank in messages, by the local rank of its process; ``None``
            instead of a function: ranks have no names yet.
        failed: name of the class of the error that this process got from the last run; empty: the
            last run has not failed.
    """

    processes: ClassVar[list["subprocess.Popen[bytes]"]] = []
    lose: Callable[[Collection[int]], set[int] | None] | None = None
    name_of: Callable[[int], str] | None = None
    failed = ""


def not_caught() -> str:
    """Say, for a message, that a started process ended by an error that this process has caught.

    For use after a failed run (``Children.failed`` is not empty).

    Returns:
        A clause that continues a sentence about the started process.
    """
    return (
        f"it did not catch the {Children.failed} of an earlier run, which this process has caught. "
        "`except` holds on every rank if the class of the error stands at the top of a module; one "
        "that is made in a function cannot be sent to other ranks"
    )


def miss_nobody() -> None:
    """Check, before another run, that a failed run has ended none of the started processes.

    Does nothing if the last run has not failed.

    Raises:
        RemoteError: a started process has ended with an error, and would be missing in the run.
    """
    ended = next((child for child in Children.processes if child.poll()), None)
    if Children.failed and ended is not None:
        raise RemoteError(
            f"A process of this script (PID {ended.pid}) has ended with code {ended.returncode}: "
            f"{not_caught()}. No run can follow; start the script anew."
        )


def leave_nobody() -> None:
    """Give started processes some seconds to end, then kill them; called at exit of the script.

    Does nothing if the last run has not failed. The started processes notice the end of this
    process by its closed connections, so this process must not wait for them: a shell does, in the
    background.
    """
    children = [str(child.pid) for child in Children.processes if child.poll() is None]
    if Children.failed and children:
        nowhere = subprocess.DEVNULL
        with suppress(OSError):  # there is no shell
            subprocess.Popen(
                ["sh", "-c", _LATER, "sh", *children],
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                start_new_session=True,
            )


class _Keeper:
    """Holds the shell that :func:`keep_ranks` has started; ``None``: no shell runs."""

    process: "subprocess.Popen[bytes] | None" = None


def keep_ranks(children: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Start a shell that kills the started ranks if this process ends before `have_met` is called.

    Called right after their start. Does nothing on a system without a shell.

    Args:
        children: the processes of these ranks; empty: no shell is started.
    """
    if not children:
        return
    command = ["sh", "-c", _KEEPER, "sh", *(str(child.pid) for child in children)]
    with suppress(OSError):  # nothing watches on a system without a shell
        _Keeper.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def have_met() -> None:
    """End the shell that :func:`keep_ranks` has started, if there is one.

    Called when all ranks have met: from then on they notice by themselves when one ends.
    """
    keeper, _Keeper.process = _Keeper.process, None
    if keeper is not None:
        keeper.communicate(b"met\n")
