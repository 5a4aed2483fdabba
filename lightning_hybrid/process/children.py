"""The processes that a script starts as ranks: they end with it, and it sees who has ended.

Once all ranks have met, connections tell who is gone. Before, a rank that imports would wait for
the store of a process that was killed, for as long as a store may take to begin; while it imports
it cannot look after anything. So a shell does (:func:`keep_ranks`).
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from lightning_hybrid.errors import RemoteError
from lightning_hybrid.process.faults import GRACE_S

# reads a line from the process that has started it; finds the end of its pipe if that is gone
_KEEPER = (
    'read -r met || { echo "Ranks that have not met yet end (processes $*): the process that has '
    'started them is gone." >&2; kill -9 "$@" 2>/dev/null; }'
)


class Children:
    """The processes that this one has started, by whichever Trainer, for all Trainers."""

    processes: Sequence["subprocess.Popen[bytes]"] = ()
    failed = ""  # the class of the error with which the last run has failed, here


def not_caught() -> str:
    """The text for a process that ends because it did not catch an error that others caught."""
    return (
        f"it did not catch the {Children.failed} of an earlier run, which this process has caught. "
        "`except` holds on every rank if the class of the error stands at the top of a module; one "
        "that is made in a function cannot be sent to other ranks"
    )


def miss_nobody() -> None:
    """After a run that failed: a process that has ended with it will not come to the next one.

    Raises:
        RemoteError: there is such a process.
    """
    ended = next((child for child in Children.processes if child.poll()), None)
    if Children.failed and ended is not None:
        raise RemoteError(
            f"A process of this script (PID {ended.pid}) has ended with code {ended.returncode}: "
            f"{not_caught()}. No run can follow; start the script anew."
        )


def leave_nobody() -> None:
    """At the end of a script that failed: kill the children that do not end by themselves.

    They notice the end of this process by its closed connections, so that it cannot wait for
    them; another one does, which has none of these open.
    """
    children = [child for child in Children.processes if child.poll() is None]
    if not Children.failed or not children or not hasattr(os, "fork") or os.fork():
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(_exists(child.pid) for child in children):
        time.sleep(0.1)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    os._exit(0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class _Keeper:
    process: "subprocess.Popen[bytes] | None" = None


def keep_ranks(children: Sequence["subprocess.Popen[bytes]"]) -> None:
    """See to it that started ranks end with this process, however it ends, until `have_met`."""
    if not children:
        return
    command = ["sh", "-c", _KEEPER, "sh", *(str(child.pid) for child in children)]
    with suppress(OSError):  # a system without a shell goes without
        _Keeper.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def have_met() -> None:
    """All ranks have met: connections tell who is gone, and scripts may end one by one."""
    keeper, _Keeper.process = _Keeper.process, None
    if keeper is not None:
        keeper.communicate(b"met\n")
