"""Whatever fails on a rank before the first command of a run, all ranks end, and say why first."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import USUAL, Training
from failed_start_script import STEPS
from ports import free_port
from prepared import Forked, prepared
from test_faults import alive, family, first_error, limit_s

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
SCRIPT = Path(__file__).with_name("failed_start_script.py")
slow = pytest.mark.conformance
DRIVERS, WORKERS = (0, 2), (1, 3)
RANKS = {
    **{step: range(4) for step in STEPS if step != "store"},
    **dict.fromkeys(("drivers", "default", "barrier", "weights", "session", "command"), DRIVERS),
    "serve": WORKERS,
    "rehearsal": [0],
}
STARTS = [(step, rank, hosts) for step in RANKS for rank in RANKS[step] for hosts in (1, 2)]


def start(folder: Path, ranks: int, hosts: int) -> list[Forked]:
    """Start all ranks, as a cluster does that looks after none of them."""
    port, started = free_port(), []
    for rank in range(ranks):
        place = {
            "NODE_RANK": f"{rank * hosts // ranks}",
            "LOCAL_RANK": f"{rank % (ranks // hosts)}",
        }
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", **place}
        started.append(
            prepared()[rank > 0].start(
                [str(SCRIPT), str(folder)],
                env=os.environ | USUAL | job,
                cwd=folder,
                output=folder / "output.txt",
            )
        )
    return started


def read(folder: Path, name: str) -> str:
    return (folder / name).read_text()


def check(folder: Path) -> str:
    """All have ended just now. Returns what they have printed."""
    took_s = time.monotonic() - float(read(folder, "fault"))
    output = read(folder, "output.txt")
    print(f"ended after {took_s:.1f} s")
    assert took_s < limit_s(), output
    assert "this error is on purpose" in first_error(output), output
    return output


def until(holds: Callable[[], bool], patience_s: float = 150) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end(
    folder: Path,
    processes: Sequence[Forked],
    but: Sequence[int] = (),
    more: float = 0,
    *,
    kills: bool = True,
) -> str:
    """Wait for the end of all but some. Returns what they have printed.

    They may take ``more`` seconds than usual. Then the others are killed, if wanted.
    """
    waited = [process for rank, process in enumerate(processes) if rank not in but]
    try:
        until(lambda: None not in [process.poll() for process in waited])
        output = "" if but else check(folder)
        took_s = time.monotonic() - float(read(folder, "fault"))
        assert took_s < limit_s(more), read(folder, "output.txt")
        assert all(process.poll() for process in waited), output
        return output
    finally:
        for process in processes if kills else ():
            process.kill()


def configure(folder: Path, step: str, rank: int, hosts: int = 1, **more: Any) -> None:
    config = {"replicas": 2, "stages": 2, "stays": False, "step": step, "rank": rank} | more
    (folder / "config.json").write_text(json.dumps({**config, "hosts": hosts}))


@pytest.mark.parametrize(
    ("step", "rank", "hosts"),
    [pytest.param(*case, marks=slow, id="-".join(map(str, case))) for case in STARTS],
)
def test_all_end_with_a_rank_that_fails_before_the_first_command(
    tmp_path: Path, step: str, rank: int, hosts: int
) -> None:
    configure(tmp_path, step, rank, hosts)
    end(tmp_path, start(tmp_path, 4, hosts))


@pytest.mark.conformance
def test_who_waits_for_a_rank_that_makes_no_group_ends_with_it(tmp_path: Path) -> None:
    configure(tmp_path, "activations", 1, replicas=1)
    assert "(raised on rank 1 (worker" in end(tmp_path, start(tmp_path, 2, 1))


@slow
@pytest.mark.parametrize(("step", "rank"), [("world", 1), ("gradients", 3), ("session", 2)])
def test_the_others_do_not_wait_for_the_end_of_a_script_that_has_caught_the_error(
    tmp_path: Path, step: str, rank: int
) -> None:
    configure(tmp_path, step, rank, stays=True)
    end(tmp_path, start(tmp_path, 4, 1), but=[rank])


@slow
@pytest.mark.parametrize("step", ["gradients", "weights"])
def test_servers_alone_wait_for_the_end_of_a_script_of_rank_0_that_has_caught_the_error(
    tmp_path: Path, step: str
) -> None:
    configure(tmp_path, step, 0, stays=True)
    processes = start(tmp_path, 4, 1)
    waiting = [process for rank, process in enumerate(processes) if rank in (0, *WORKERS)]
    try:
        end(tmp_path, processes, but=[0, *WORKERS], kills=False)
        until(lambda: processes[0].poll() is not None)
        ended_s = time.monotonic()
        until(lambda: None not in [process.poll() for process in waiting])
        assert time.monotonic() - ended_s < limit_s()
    finally:
        for process in processes:
            process.kill()


@slow
@pytest.mark.parametrize("rank", DRIVERS)
def test_a_driver_that_stops_between_two_runs_is_waited_for_until_the_time_out_and_named(
    tmp_path: Path, rank: int
) -> None:
    configure(tmp_path, "stops", rank, timeout_s=5)
    end(tmp_path, start(tmp_path, 4, 1), but=[rank], more=5)
    assert f"Lost rank {rank} " in first_error(read(tmp_path, "output.txt"))


@slow
@pytest.mark.parametrize("rank", DRIVERS)
def test_who_has_started_a_rank_without_a_store_ends_with_it(tmp_path: Path, rank: int) -> None:
    # (of other hosts nobody can hear of it: they wait for it for ten minutes)
    configure(tmp_path, "store", rank)
    config = json.loads(read(tmp_path, "config.json"))
    started, members = Training(tmp_path, script=SCRIPT, **config).start(), set[int]()
    while started.poll() is None or alive(members):
        members |= family(started.pid)
        time.sleep(0.05)
    check(tmp_path)
