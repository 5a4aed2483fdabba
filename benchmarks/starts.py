"""What starts of a run take two equal devices for, beside other work and with a real half quota.

Claim: beside a bursty load 20 of 20 starts see two equal devices, so that the plan is even; where
one process may run half of the time, 20 of 20 find that its device has 0.4 to 0.6 of the other's
speed. A start is the survey of the devices alone, in two new processes of one thread each: what a
run does before it plans.

* *bursty*: one process computes for 0.1 to 0.5 s, sleeps for 0.2 to 0.6 s, and so on, at random.
* *half quota*: rank 1 has half of a processor, by a control group of its own (Linux, as root) with
  the period of 100 ms that container engines set; or, where that cannot be made or with ``--by
  signals``, it is stopped for every other 5 ms.

    python benchmarks/starts.py [--starts 20] [--by group|signals]
"""

import argparse
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from _results import record
from rich.console import Console
from rich.table import Table
from slow_device import be_slow, slow_group

from lightning_hybrid.comm import Coordinates
from lightning_hybrid.process import Meeting, look_around
from lightning_hybrid.process.joining import meet_all, reach

CPU = torch.device("cpu")
STOPPED_S = 0.005
PERIOD_US = 100_000
PATIENCE_S = 120
FORK = multiprocessing.get_context("fork")  # what is imported is imported once


def bursts() -> None:
    """Computes now and then, for ever."""
    dice = random.Random()
    while True:
        end_s = time.perf_counter() + dice.uniform(0.1, 0.5)
        while time.perf_counter() < end_s:
            pass
        time.sleep(dice.uniform(0.2, 0.6))


@contextmanager
def bursty_load() -> Iterator[None]:
    load = FORK.Process(target=bursts, daemon=True)
    load.start()
    try:
        yield
    finally:
        load.kill()
        load.join()


def look(rank: int, port: int, group: str | None, found: Connection) -> None:
    """One rank of a start: rank 0 says what speeds it has found."""
    torch.set_num_threads(1)
    if group is not None and rank == 1:
        be_slow(group)
    everyone = reach(Coordinates(rank, 1, 2), Meeting("127.0.0.1", port, 1, rank == 0))
    meet_all(everyone)
    cluster = look_around(everyone.world, CPU, "gloo", None).cluster(1, 2)
    if rank == 0:
        found.send(cluster.speeds)


def stop_now_and_then(pid: int, over: threading.Event) -> None:
    """Let a process run half of the time."""
    while not over.is_set():
        for kind in (signal.SIGSTOP, signal.SIGCONT):
            try:
                os.kill(pid, kind)
            except ProcessLookupError:
                return
            time.sleep(STOPPED_S)


def start(group: str | None, signals: bool) -> tuple[float, ...]:
    """The relative speeds that one start finds.

    Args:
        group: control group that rank 1 joins; None: none.
        signals: whether rank 1 is stopped every other moment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here, there = FORK.Pipe(duplex=False)
    ranks = [FORK.Process(target=look, args=(rank, port, group, there)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    over = threading.Event()
    stopper = threading.Thread(target=stop_now_and_then, args=(ranks[1].pid, over))
    if signals:
        stopper.start()
    try:
        if not here.poll(PATIENCE_S):
            raise TimeoutError(f"a start has found nothing in {PATIENCE_S} s")
        speeds: tuple[float, ...] = here.recv()
        for rank in ranks:
            rank.join(PATIENCE_S)
    finally:
        over.set()
        for rank in ranks:
            rank.kill()
            rank.join()
        if signals:
            stopper.join()
    return speeds


@contextmanager
def halves(by: str) -> Iterator[tuple[str | None, bool]]:
    """How rank 1 gets half of a processor: a control group, or signals."""
    if by == "signals":
        yield None, True
        return
    with slow_group(PERIOD_US) as group:
        given = group != "neighbour"  # which stands for: no group can be made here
        yield (group if given else None), not given


def row(name: str, starts: int, is_right: Callable[[float], bool], how: Any) -> list[str]:
    ratios, times = [], []
    for _ in range(starts):
        since_s = time.perf_counter()
        speeds = start(*how)
        times.append(time.perf_counter() - since_s)
        ratios.append(round(speeds[1] / speeds[0], 2))
    right = sum(map(is_right, ratios))
    record({name: right}, f"of {starts} starts")
    seen = ", ".join(f"{ratio:g} ({ratios.count(ratio)})" for ratio in sorted(set(ratios)))
    return [name, f"{right} of {starts}", seen, f"{max(times):.1f} s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--by", choices=["group", "signals"], default="group")
    chosen = parser.parse_args()
    table = Table("", "right", "speed of rank 1 by that of rank 0 (starts)", "longest start")
    with bursty_load():
        table.add_row(*row("bursty load", chosen.starts, lambda r: r == 1.0, (None, False)))
    with halves(chosen.by) as how:
        name = "half quota, by " + ("signals" if how[1] else "control group")
        table.add_row(*row(name, chosen.starts, lambda r: 0.4 <= r <= 0.6, how))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
