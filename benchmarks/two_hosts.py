"""Two hosts over 100 Mbit/s: this package against `ddp`, 3D-ResAttNet-18, one thread a host.

Claim: with automatic sizes a step takes at most a third of what it takes under `ddp`, on as many
samples. The hosts are two network namespaces of this machine with names of their own (Linux, as
root, with `ip` and `tc` of iproute2), joined by a switch whose cables let 100 Mbit/s through each
way (`tbf rate 100mbit burst 256kbit latency 50ms`). Each runs one process of one thread. Peers
alternate, each run has a warm-up; shown are medians of all steps, with the least and the longest.

    python benchmarks/two_hosts.py [--rounds 3] [--steps 5] [--peers "ddp;automatic"]
"""

import argparse
import json
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _hosts import hosts, missing_tool, run_on
from _results import record
from _timing import Clock, Divided, bare_trainer, durations
from rich.console import Console
from rich.table import Table

from lightning_hybrid import HybridGabraStrategy
from models import ResAttNet3D

SHAPE, BATCH = (1, 64, 64, 64), 6
WARM_UP = 2
MBIT = 100
PEERS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "automatic": HybridGabraStrategy,
    "hybrid 1x2": lambda: HybridGabraStrategy(pipeline_parallel_size=2),
}


def train(peer: str, rank: int, steps: int, out: Path) -> None:
    """One host's process."""
    socket.sethostname(f"host{rank}")  # it has a namespace of names of its own
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock, strategy = Clock(), PEERS[peer]()
    trainer = bare_trainer(
        strategy, devices=1, num_nodes=2, max_steps=steps + WARM_UP, callbacks=[clock]
    )
    trainer.fit(Divided(ResAttNet3D(18), SHAPE, BATCH, steps + WARM_UP + 1))
    if trainer.is_global_zero:
        found: dict[str, Any] = {"steps": durations(clock.starts, WARM_UP), "note": ""}
        if isinstance(strategy, HybridGabraStrategy):
            plan, replicas = strategy.plan, strategy.num_replicas
            found["note"] = f"{replicas}x1"
            if plan is not None:
                found["note"] = f"{replicas}x{plan.stages}, {plan.microbatches}, at {plan.cuts[0]}"
        out.write_text(json.dumps(found))


def measured(names: list[str], peer: str, steps: int, cache: str) -> dict[str, Any]:
    """The steps of one run of two processes."""
    environment = {"OMP_NUM_THREADS": "1", "LIGHTNING_HYBRID_CACHE": cache}
    found = run_on(names, __file__, ["--run", peer, "--steps", str(steps)], environment)
    return dict(json.loads(found)) if found else {"steps": [], "note": "failed"}


def compare(peers: list[str], rounds: int, steps: int) -> None:
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    notes: dict[str, str] = {}
    with hosts(2, MBIT) as names, tempfile.TemporaryDirectory() as cache:
        for _ in range(rounds):
            for peer in peers:
                found = measured(names, peer, steps, cache)
                times[peer] += found["steps"]
                notes[peer] = found["note"]
    table = Table("peer", "median, s", "least to longest, s", "ddp takes", "sizes")
    medians = {peer: statistics.median(v) for peer, v in times.items() if v}
    record(medians, "s")
    for peer in peers:
        if peer not in medians:
            table.add_row(peer, "-", "-", "-", notes[peer])
            continue
        ratio = f"{medians['ddp'] / medians[peer]:.2f} x" if "ddp" in medians else "-"
        spread = f"{min(times[peer]):.3f} to {max(times[peer]):.3f}"
        table.add_row(peer, f"{medians[peer]:.3f}", spread, ratio, notes[peer])
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=";".join(PEERS), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--run", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        train(chosen.run, chosen.rank, chosen.steps, chosen.out)
        return
    peers = chosen.peers.split(";")
    if unknown := set(peers) - set(PEERS):
        parser.error(f"there is no peer {min(unknown)!r}; known: {', '.join(PEERS)}")
    if missing := missing_tool():
        parser.error(missing)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are deleted
    compare(peers, chosen.rounds, chosen.steps)


if __name__ == "__main__":
    main()
