"""One of two devices at half speed: measured capacities against an even split, shares and `ddp`.

Claims: the step with measured capacities is at least 1.15 times faster; with two replicas that take
samples by their speed it is at least 1.25 times faster than under `ddp`. 3D-ResAttNet-18, two
processes with one thread each, 3 micro-batches, fill and drain. The process of the worker (stage 0)
may run half of the time: by a CPU quota of its own (Linux, as root), or, where that cannot be set,
by a busy neighbour pinned to the same core. *Even* tells the strategy that both devices are equal,
*measured* lets it look. `ddp` has half of the samples on each device, *shares* eight of the twelve
on the faster one (`BySpeed()`, at best 1.5 times faster). The runs alternate.

With s the time of the whole network for one micro-batch, the even split takes (0.5 + 3 * 1) s, and
one by speed, two thirds and one third, 4 * 2/3 s: at best a ratio of 1.31.

    python benchmarks/slow_device.py [--rounds 4] [--steps 8]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from _quota import PERIOD_US, join, quota
from _results import record
from _timing import Clock, Divided, bare_trainer, durations
from torch.distributed import TCPStore

from lightning_hybrid import BySpeed, HybridGabraStrategy, Search
from models import ResAttNet3D

BATCH, MICROBATCHES, SIDE = 12, 3, 48
KINDS = ("even", "measured", "shares", "ddp")
WARM_UP = 2
SLOWED = "1"  # local rank


def measure(kind: str, steps: int, out: str) -> None:
    if os.environ.get("LOCAL_RANK") == SLOWED:
        be_slow(os.environ["SLOW_BY"])
    elif os.environ["SLOW_BY"] == "neighbour":
        os.sched_setaffinity(0, {0})
    torch.manual_seed(0)
    strategy: Any = "ddp"
    if kind == "shares":
        strategy = HybridGabraStrategy(data_parallel_size=2, replicas=BySpeed())
    elif kind != "ddp":
        strategy = HybridGabraStrategy(
            pipeline_parallel_size=2,
            num_microbatches=MICROBATCHES,
            search=Search(capacity="auto" if kind == "measured" else [1.0, 1.0]),
        )
    clock, shape = Clock(), (1, SIDE, SIDE, SIDE)
    trainer = bare_trainer(strategy, devices=2, max_epochs=1, callbacks=[clock])
    trainer.fit(Divided(ResAttNet3D(18), shape, BATCH, steps + WARM_UP))
    if trainer.is_global_zero:
        plan = None if kind in ("ddp", "shares") else json.loads(strategy.plan.to_json())
        seconds = durations(clock.starts, WARM_UP)
        Path(out).write_text(json.dumps({"steps": seconds, "plan": plan}))


def be_slow(by: str) -> None:
    """Let this process run half of the time from now on."""
    if by == "neighbour":
        os.sched_setaffinity(0, {1})
    else:
        join(Path(by))


@contextmanager
def slow_group(period_us: int = PERIOD_US) -> Iterator[str]:
    """A control group with half of a processor; else a busy neighbour on core 1."""
    with ExitStack() as stack:
        try:
            by = str(stack.enter_context(quota("lightning_hybrid_slow", 0.5, period_us)))
        except OSError:
            loop = [sys.executable, "-c", "while 1: 0"]
            neighbour = subprocess.Popen(["taskset", "-c", "1", *loop])
            stack.callback(neighbour.kill)
            by = "neighbour"
        yield by


def free_port() -> int:
    """A port of this host that nobody uses."""
    port: int = TCPStore("127.0.0.1", 0, None, True).port
    return port


def run(kind: str, steps: int, by: str, cache: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        command = [sys.executable, __file__, "--run", kind, "--steps", str(steps), "--out", out]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SLOW_BY": by}
        environment["LIGHTNING_HYBRID_CACHE"] = cache
        # (as a cluster starts ranks, so that the second process can be slow from the start on)
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
        silent = subprocess.DEVNULL
        ranks = [
            subprocess.Popen(
                command,
                env=environment | port | {"LOCAL_RANK": rank},
                stdout=silent,
                stderr=silent,
            )
            for rank in ("0", SLOWED)
        ]
        if max(process.wait() for process in ranks):
            raise SystemExit(f"{kind} has failed: {' '.join(command)}")
        seen: dict[str, Any] = json.loads(Path(out).read_text())
        return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--run", choices=KINDS)
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    if arguments.run:
        measure(arguments.run, arguments.steps, arguments.out)
        return
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with slow_group() as by, tempfile.TemporaryDirectory() as cache:
        print(f"the worker is slowed by {by}")
        for number in range(arguments.rounds):
            for kind, times in medians.items():
                seen = run(kind, arguments.steps, by, cache)
                times.append(statistics.median(seen["steps"]))
                print(f"round {number} {kind:8}: {times[-1]:.3f} s", end="")
                if plan := seen["plan"]:
                    load, predicted = plan["rows"][0]["load"], plan["predicted_step_s"]
                    print(
                        f" (predicted {predicted:.3f} s), capacities {plan['capacities']}", end=""
                    )
                    print(f", stage 0 has {load:.0%} of the load", end="")
                print()
    found = {kind: statistics.median(times) for kind, times in medians.items()}
    record(found, "s")
    even, measured, shares, ddp = found.values()
    print(
        f"median step: even {even:.3f} s, measured {measured:.3f} s, ratio {even / measured:.3f} "
        f"(claim: at least 1.15; at best 1.31); ddp {ddp:.3f} s, {measured / ddp:.3f} of it\n"
        f"shares {shares:.3f} s: ddp takes {ddp / shares:.3f} times as long (claim: at least 1.25)"
    )


if __name__ == "__main__":
    main()
