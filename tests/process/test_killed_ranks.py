"""What is said of a killed rank where the others do not end by themselves."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from lightning_hybrid.process import Children, KilledRanksWatch, killed_ranks


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By the process before it ends itself."""
    lines: list[str] = []
    monkeypatch.setattr(killed_ranks, "end_process", lines.append)
    monkeypatch.setattr(killed_ranks, "GRACE_S", 0.1)
    return lines


@pytest.fixture
def sleepers() -> Iterator[list["subprocess.Popen[bytes]"]]:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = [subprocess.Popen(command) for _ in range(2)]
    yield started
    for each in started:
        each.kill()
        each.wait()


def test_a_killed_rank_is_named_where_the_others_do_not_end(
    said: list[str], sleepers: list["subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Children, "name_of", lambda number: f"rank {number} (worker)")
    watch = KilledRanksWatch(sleepers)
    watch.start()
    sleepers[1].kill()
    watch.join(30)
    pid = sleepers[1].pid
    [line] = said
    assert line.startswith(f"Lost rank 2 (worker). Its process (PID {pid}) was killed by signal 9;")
    assert sleepers[0].wait(30) == -9


def test_a_rank_that_has_failed_is_named_with_its_code(
    said: list[str], sleepers: list["subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Children, "name_of", lambda number: f"rank {number} (worker)")
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    watch = KilledRanksWatch([*sleepers, ended])
    watch.start()
    watch.join(30)
    assert said[0].startswith(f"rank 3 (worker) (PID {ended.pid}) ended with code 3;")


def test_before_ranks_have_names_the_process_is_told(
    said: list[str], sleepers: list["subprocess.Popen[bytes]"]
) -> None:
    watch = KilledRanksWatch(sleepers)
    watch.start()
    sleepers[0].kill()
    watch.join(30)
    assert said[0].startswith(f"A process of this run (PID {sleepers[0].pid}) ended with code -9;")
