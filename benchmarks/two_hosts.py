"""Two hosts over 100 Mbit/s: this package against `ddp`, 3D-ResAttNet-18, one thread a host.

Claim: with automatic sizes a step takes at most a third of what it takes under `ddp`, on as many
samples. The hosts are two network namespaces of this machine with names of their own (Linux, as
root, with `ip` and `tc` of iproute2), joined by a cable whose both ends let 100 Mbit/s through
(`tbf rate 100mbit burst 256kbit latency 50ms`). Each runs one process of one thread. Peers
alternate, each run has a warm-up; shown are medians of all steps, with the least and the longest.

    python benchmarks/two_hosts.py [--rounds 3] [--steps 5] [--peers "ddp;automatic"]
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _results import record
from _timing import Clock, Divided, bare_trainer, durations
from rich.console import Console
from rich.table import Table

from lightning_hybrid import HybridGabraStrategy
from models import ResAttNet3D

SHAPE, BATCH = (1, 64, 64, 64), 6
WARM_UP = 2
RATE = ("rate", "100mbit", "burst", "256kbit", "latency", "50ms")
PATIENCE_S = 1800
PEERS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "automatic": HybridGabraStrategy,
    "hybrid 1x2": lambda: HybridGabraStrategy(pipeline_parallel_size=2),
}


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces, 10.88.0.1 and 10.88.0.2, with a slow cable between them."""
    names = [f"two_hosts_{os.getpid()}_{letter}" for letter in "ab"]

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    try:
        for name in names:
            run("ip", "netns", "add", name)
        cable = ("type", "veth", "peer", "name", "cable1", "netns", names[1])
        run("ip", "link", "add", "cable0", "netns", names[0], *cable)
        for number, name in enumerate(names):
            device = f"cable{number}"
            run("ip", "-n", name, "addr", "add", f"10.88.0.{number + 1}/24", "dev", device)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", device, "up")
            run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *RATE)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


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


def measured(hosts: list[str], peer: str, steps: int, cache: str) -> dict[str, Any]:
    """The steps of one run of two processes."""
    common = {"MASTER_ADDR": "10.88.0.1", "MASTER_PORT": "29517", "OMP_NUM_THREADS": "1"}
    common |= {"LIGHTNING_HYBRID_CACHE": cache}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        out, processes = Path(folder) / "steps.json", []
        try:
            for rank, host in enumerate(hosts):
                inside = ["ip", "netns", "exec", host, "unshare", "--uts", sys.executable, __file__]
                run = ["--run", peer, "--rank", str(rank), "--steps", str(steps), "--out", str(out)]
                own = {"NODE_RANK": str(rank), "GLOO_SOCKET_IFNAME": f"cable{rank}"}
                environment = os.environ | common | own
                processes.append(
                    subprocess.Popen([*inside, *run], env=environment, stdout=log, stderr=log)
                )
            end_s = time.monotonic() + PATIENCE_S
            codes = [process.wait(max(1.0, end_s - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes) or not out.is_file():
            log.seek(0)
            print(f"{peer}: ended with {codes}: {log.read()[-2000:]}", file=sys.stderr)
            return {"steps": [], "note": "failed"}
        return dict(json.loads(out.read_text()))


def compare(peers: list[str], rounds: int, steps: int) -> None:
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    notes: dict[str, str] = {}
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as cache:
        for _ in range(rounds):
            for peer in peers:
                found = measured(hosts, peer, steps, cache)
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
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            parser.error(f"there is no `{tool}`: apt-get install -y iproute2 util-linux")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are deleted
    compare(peers, chosen.rounds, chosen.steps)


if __name__ == "__main__":
    main()
