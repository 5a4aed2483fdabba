"""`lightning-hybrid doctor`: measure devices and links, and check that all ranks agree."""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console

from lightning_hybrid.asking.doctor import Checkup, check_up
from lightning_hybrid.asking.terminal import show_table, terminal, write
from lightning_hybrid.comm import LARGE_BYTES, Spread
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import gigabytes

_MOST_PROCESSES = 64
_MOST_PAIRS = 28


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lightning-hybrid doctor` to a parser."""
    parser.add_argument(
        "--processes",
        type=int,
        help="processes to start on this machine; default: one for each GPU, else for each core, "
        "at most 8. Under torchrun those that it has started are taken",
    )
    parser.add_argument("--out", metavar="FILE", help="write the cluster as YAML, for plan")


def run(options: argparse.Namespace) -> None:
    """Run `lightning-hybrid doctor`: measure on all ranks, and print the results on rank 0.

    Under torchrun, each of its processes runs this as a rank. Otherwise this starts processes of
    this machine as ranks, and waits for them.

    Args:
        options: what the parser has made of the command line, with the options of `add_options`.

    Raises:
        PlanError: the processes do not find each other, or the file cannot be written.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        _start(_processes(options.processes), options.out)
        return
    found = check_up()
    if found is not None:
        _print(found)
        if options.out:
            write(options.out, found.cluster(Path(options.out).stem).to_yaml(), "cluster")


def _processes(asked: int | None) -> int:
    if asked is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        return torch.cuda.device_count() or min(cores, 8)
    if not 1 <= asked <= _MOST_PROCESSES:
        raise PlanError(f"--processes {asked}: a number from 1 to {_MOST_PROCESSES} is needed")
    return asked


def _start(count: int, out: str | None) -> None:
    """Run `lightning-hybrid doctor` in processes of this machine, as torchrun would; wait for them.

    Args:
        count: number of processes.
        out: value of the option ``--out``, a path; None: nothing is written.

    Raises:
        PlanError: a process has failed.
    """
    # port 0 makes the system choose a free one
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common["LOCAL_WORLD_SIZE"] = count
    command = [sys.executable, "-m", "lightning_hybrid", "doctor"]
    command += ["--out", out] if out else []
    processes = []
    try:
        for rank in range(count):
            more = {k: str(v) for k, v in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            # the errors of rank 0 stand for those of all
            errors = None if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=os.environ | more, stderr=errors))
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            # if another one has failed, it would wait for minutes
            if process.poll() is None:
                process.kill()
    if any(codes):
        raise PlanError(f"the processes ended with the codes {codes}")


def _print(found: Checkup) -> None:
    console = terminal()
    columns = ("rank", "host", "device", "GFLOP/s", "memory", "shared memory", "address")
    rows = []
    for rank, fact in enumerate(found.facts):
        device, rate = fact.device, f"{fact.device.units_per_s / 1e9:,.4g}"
        memory = _gb(device.memory_bytes), _gb(fact.shared_bytes)
        rows.append((str(rank), device.host, device.name, rate, *memory, fact.address))
    show_table(console, "Ranks", columns, rows, left=("host", "device"))
    if found.pairs:
        _print_links(console, found)
    versions = found.facts[0].versions
    console.print(
        "versions: " + ", ".join(f"{k} {v}" for k, v in versions.items() if v != "not installed")
    )
    problems = found.disagreements()
    for line in problems:
        console.print(f"DIFFERS {line}")
    if not problems and len(found.facts) > 1:
        console.print("All ranks reach each other and agree in versions.")


def _print_links(console: Console, found: Checkup) -> None:
    rows = (
        (
            " - ".join(map(str, pair.ranks)),
            _spread(pair.latency_s, 1e6),
            _spread(pair.bandwidth_bytes_per_s, 1e-9),
        )
        for pair in found.pairs[:_MOST_PAIRS]
    )
    columns = ("ranks", "latency, us", "bandwidth, GB/s")
    show_table(console, "Links: median (least to most)", columns, rows)
    if len(found.pairs) > _MOST_PAIRS:
        console.print(f"and {len(found.pairs) - _MOST_PAIRS} more pairs")
    if found.all_reduce_s is not None:
        console.print(
            f"all-reduce of {LARGE_BYTES / 2**20:g} MiB over {len(found.facts)} ranks: "
            f"{_spread(found.all_reduce_s, 1e3)} ms"
        )


def _spread(spread: Spread, factor: float) -> str:
    median, least, most = (factor * v for v in (spread.median, spread.least, spread.most))
    return f"{median:.3g} ({least:.3g} to {most:.3g})"


def _gb(size: float | None) -> str:
    return "unknown" if size is None else gigabytes(size)
