"""A thread that cannot begin is an error, and not a wait without an end."""

import signal
import subprocess
import sys
import threading

import pytest

from lightning_hybrid.comm import threads
from lightning_hybrid.comm.threads import BackgroundThread


def test_a_thread_runs_and_is_waited_for() -> None:
    seen: list[str] = []
    thread = BackgroundThread(lambda *given: seen.extend(given), "of a test", "a", "b")
    assert thread.daemon
    assert thread.name == "of a test"
    thread.start()
    thread.join()
    assert seen == ["a", "b"]


def test_one_that_python_drops_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_BEGINS_WITHIN_S", 0.1)
    monkeypatch.setattr(threading, "_start_new_thread", lambda *_: 1)
    with pytest.raises(MemoryError, match="A thread has not begun within"):
        BackgroundThread(print, "of a test").start()


def test_one_that_could_not_start_need_not_be_waited_for() -> None:
    BackgroundThread(print, "of a test").join()


def test_one_that_has_no_room_for_its_stack_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        BackgroundThread(print, "of a test").start()


def test_a_process_gives_those_that_it_awaits_time_to_end() -> None:
    script = (
        "import runpy, time\n"
        f"BackgroundThread = runpy.run_path({threads.__file__!r})['BackgroundThread']\n"
        "def run(seconds): time.sleep(seconds); print(seconds, flush=True)\n"
        "BackgroundThread(run, 'awaited', 0.5, awaited=True).start()\n"
        "BackgroundThread(run, 'not awaited', 60).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stderr


@pytest.mark.parametrize("reader", ["nobody", "one that is busy"])
def test_a_process_ends_where_nobody_reads_why(reader: str) -> None:
    script = (
        "import os, runpy, sys\n"
        f"end_process = runpy.run_path({threads.__file__!r})['end_process']\n"
        "reads, writes = os.pipe()\n"
        "os.dup2(writes, 2)\n"
        "os.set_blocking(2, False)\n"
        "if sys.argv[1] == 'nobody': os.close(reads)\n"
        "else: os.write(2, bytes(2**20))  # as much as there is room for\n"
        "os.set_blocking(2, True)\n"
        "end_process('a reason')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, reader], timeout=120)
    assert done.returncode == -signal.SIGKILL
