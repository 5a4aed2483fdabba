"""A failed rank ends all ranks, with the first cause shown first, and leaves no process behind."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Training

pytestmark = pytest.mark.distributed
LIMIT_S = 15
Start = Callable[..., tuple[Training, "subprocess.Popen[str]"]]


def family(pid: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            parents[int(fields["Pid"])] = int(fields["PPid"])
        except (OSError, KeyError, ValueError):
            continue
    members = {pid}
    while grown := {p for p, parent in parents.items() if parent in members} - members:
        members |= grown
    return members


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}/exe").exists()}


def ready(training: Training, ranks: int) -> dict[int, int]:
    """Wait until every rank trains. Returns process numbers by rank."""
    deadline = time.monotonic() + 120
    while len(found := list(training.folder.glob("pid*"))) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return {int(path.suffix[1:]): int(path.read_text()) for path in found}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a training that would go on for hours; what is left of it is killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(**config: Any) -> tuple[Training, "subprocess.Popen[str]"]:
        training = Training(tmp_path, steps=100_000, **config)
        started.append(training.start())
        return training, started[-1]

    yield begin
    for process in started:
        for pid in alive(family(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def end(training: Training, process: "subprocess.Popen[str]", members: set[int]) -> str:
    """Wait for the end of all processes of a run. Returns what they printed."""
    deadline = time.monotonic() + 120
    while process.poll() is None:
        members |= family(process.pid)
        assert time.monotonic() < deadline, training.output
        time.sleep(0.05)
    deadline = time.monotonic() + LIMIT_S
    while alive(members):
        assert time.monotonic() < deadline, f"{alive(members)} live on:\n{training.output}"
        time.sleep(0.05)
    assert process.returncode != 0
    return training.output


def first_error(output: str) -> str:
    """The first line that ends a traceback or reports a loss."""
    ends = re.compile(r"^(\[rank\d+\]: )?([\w.]+(Error|Lost): |rank \d+ .* ends because)")
    return next(line for line in output.splitlines() if ends.match(line))


CASES = [
    ("training_step", 0),  # the driver, in the user's code
    ("forward", 1),  # a worker, in its stage
    ("forward", 0),  # the driver, in its stage
    ("backward", 1),
    ("backward", 0),
    ("setup", 1),  # before there are drivers and workers
]


@pytest.mark.parametrize(("where", "rank"), CASES)
def test_an_exception_ends_all_ranks_and_is_shown_first(
    start: Start, where: str, rank: int
) -> None:
    fault = {"where": where, "rank": rank, "step": 3}
    training, process = start(stages=2, fault=fault)
    output = end(training, process, {process.pid})
    assert "ValueError: this error is on purpose" in first_error(output), output


@pytest.mark.parametrize("rank", range(4))
def test_a_killed_rank_ends_the_others_and_is_named(start: Start, rank: int) -> None:
    training, process = start(replicas=2, stages=2)
    pids = ready(training, 4)
    members = family(process.pid)
    killed = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    output = end(training, process, members)
    assert time.monotonic() - killed < LIMIT_S
    assert f"Lost rank {rank} " in first_error(output), output


def test_a_failed_replica_ends_the_other_replicas(start: Start) -> None:
    fault = {"where": "forward", "rank": 3, "step": 3}
    training, process = start(replicas=2, stages=2, fault=fault)
    output = end(training, process, {process.pid})
    assert "this error is on purpose" in first_error(output), output
    assert "rank 3 (worker, replica 1, stage 0) failed" in output
