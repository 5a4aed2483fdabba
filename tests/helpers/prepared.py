"""Processes that have imported already what ranks need: each forks itself for every run.

Importing Lightning, torch and its compiler takes a rank eight seconds of processor time, and most
runs of the tests take less. There is one such process for rank 0 and another one for all other
ranks, so that sets of texts have another order there, as in processes that are started. All workers
of a run of pytest use the same two.

``python prepared.py PACKAGES SOCKET FILE_NUMBER`` is the process: it reads requests, a message of
JSON each, from those who connect, answers each, and ends with the last of them.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, socket
from typing import Any

from places import variables
from ports import free_port

LONGEST = 1 << 18
"""Of the requests, in bytes."""
IMPORTED = (
    *("torch._dynamo", "torchmetrics", "{package}", "lightning_hybrid.run.session"),
    # which the first capture of a process imports
    *("torch._dynamo.repro.after_dynamo", "torch.distributed.tensor.experimental._func_map"),
    "sympy.tensor.tensor",
)


@cache
def prepared(
    package: str = "lightning", libraries: tuple[str, ...] = ()
) -> tuple["PreparedProcess", "PreparedProcess"]:
    """The process for rank 0, and the one for other ranks.

    Args:
        package: of Lightning.
        libraries: modules that it imports too.
    """
    first, others = (PreparedProcess((package, *libraries), ranks) for ranks in ("first", "others"))
    return first, others


def start_ranks(
    command: Sequence[str],
    count: int,
    *,
    env: Mapping[str, str],
    cwd: Path,
    output: Path,
    package: str = "lightning",
    libraries: tuple[str, ...] = (),
) -> list["Forked"]:
    """Start a script as often as it has ranks, as a cluster does for Lightning.

    Args:
        command: the script, and its arguments.
        count: of the ranks; a single one is told nothing.
        env: the environment of all.
        cwd: where they work.
        output: a file to which they append what they print.
        package: of Lightning.
        libraries: modules that are imported before.
    """
    first, others = prepared(package, libraries)
    port, ranks = free_port(), []
    for rank in range(count):
        mine = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", **variables(rank, count)}
        place = others if rank else first
        told = {**env, "TEST_RANK": f"{rank}", **(mine if count > 1 else {})}
        ranks.append(place.start(command, env=told, cwd=cwd, output=output))
    return ranks


class PreparedProcess:
    """The process, for those who ask it: who comes first starts it.

    Args:
        packages: that of Lightning, and others that it imports.
        ranks: whose it is.
    """

    def __init__(self, packages: tuple[str, ...], ranks: str) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
        path = Path(tempfile.gettempdir()) / "-".join((run, packages[0], *packages[1:2], ranks))
        self._connection = socket(AF_UNIX, SOCK_SEQPACKET)
        atexit.register(self._connection.close)
        with _one_at_a_time():
            if not path.exists():
                _start(packages, path)
            self._connection.connect(f"{path}")

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: Path
    ) -> "Forked":
        """Run a script in a process and a session of its own.

        Args:
            command: the script, and its arguments.
            env: the whole environment.
            cwd: where it works.
            output: a file to which it appends what it prints.
        """
        request = {"command": [*command], "env": {**env}, "cwd": f"{cwd}", "output": f"{output}"}
        return Forked(self, int(self._ask(request)))

    def exit_code(self, pid: int) -> int | None:
        """That of a process of mine; ``None``: it runs."""
        code = self._ask({"poll": pid})
        return None if code is None else int(code)

    def _ask(self, request: Mapping[str, Any]) -> Any:
        self._connection.send(json.dumps(request).encode())
        return json.loads(self._connection.recv(LONGEST))


class Forked:
    """What it has forked, as far as tests need it; see `subprocess.Popen`.

    Args:
        parent: who has forked it.
        pid: of the process, which is also that of its session.
    """

    def __init__(self, parent: PreparedProcess, pid: int) -> None:
        self.pid, self._parent = pid, parent
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; ``None``: it runs."""
        if self._code is None:
            self._code = self._parent.exit_code(self.pid)
        return self._code

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait for the end, for so many seconds at most. Returns the exit code."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
            time.sleep(0.02)
        return code

    def kill(self) -> None:
        """Kill it with all that it has started, as far as it is left."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Nobody connects to a process that has decided to end, and nobody starts a second one."""
    with Path(__file__).open() as file:
        flock(file, LOCK_EX)
        yield


def _start(packages: tuple[str, ...], path: Path) -> None:
    """Not as a `Popen`, which warns at the end here: others may need the process for longer."""
    usual = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    root = str(Path(__file__).parents[2])
    with socket(AF_UNIX, SOCK_SEQPACKET) as listening:
        listening.bind(f"{path}")
        listening.listen()
        listening.set_inheritable(True)
        os.posix_spawn(
            sys.executable,
            [sys.executable, __file__, ",".join(packages), f"{path}", f"{listening.fileno()}"],
            os.environ | usual | {"PYTHONPATH": root},
        )


def _serve(path: Path, listening: socket) -> list[str]:
    """Fork for each request. Returns in the child, with its command."""
    codes: dict[int, int | None] = {}
    sockets = [listening]
    for client, request in _requests(path, sockets):
        if (pid := request.get("poll")) is not None:
            if codes[pid] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
            answer = codes[pid]
        elif answer := os.fork():
            codes[answer] = None
        else:
            for inherited in sockets:
                inherited.close()
            _begin(request)
            return list(request["command"])
        client.send(json.dumps(answer).encode())
    sys.exit()


def _requests(path: Path, sockets: list[socket]) -> Iterator[tuple[socket, dict[str, Any]]]:
    """With those who ask, whose sockets are added to the first one, until all have left."""
    listening = sockets[0]
    while True:
        for each in select.select(sockets, [], [])[0]:
            if each is listening:
                sockets.append(listening.accept()[0])
            elif message := each.recv(LONGEST):
                yield each, json.loads(message)
            else:
                sockets.remove(each)
                each.close()
        if len(sockets) == 1:
            with _one_at_a_time():
                if not select.select(sockets, [], [], 0)[0]:
                    path.unlink()
                    return


def _begin(request: dict[str, Any]) -> None:
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = request["env"]["PYTHONPATH"].split(os.pathsep)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for file, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(file, number)
    sys.argv = list(request["command"])


if __name__ == "__main__":
    package, *libraries = sys.argv[1].split(",")
    for module in (*(module.format(package=package) for module in IMPORTED), *libraries):
        __import__(module)
    from untimed import leave_guards_untimed  # and no earlier: tests import this file too

    leave_guards_untimed()
    gc.freeze()  # else each child copies all that is imported when it collects, and when it ends
    script, *_ = _serve(Path(sys.argv[2]), socket(fileno=int(sys.argv[3])))
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
