"""What it costs that stages are compared with the network's own Python, over 1,000 steps.

Two processes with one thread each, two stages, two micro-batches; runs with ``verify="auto"`` and
``verify=False`` alternate. A small network (six linear layers of 64, with and without dropout)
trains for 1,000 steps. The large one, 3D-ResAttNet-18 on 64x64x64 volumes, batch 4, trains for
fewer; its checks are those of calls 1, 2, 4, 8, ..., so what one costs is multiplied with the ten
that 1,000 steps have.

A check makes its own step longer. So its cost is taken from the steps of one run (what steps with a
check take beyond the median of the others), which the load of the machine changes less than it
changes totals; the totals of both kinds of runs are shown beside it. The first step, which captures
the network, is left out: its check counts as the mean of the others.

    python benchmarks/verify_cost.py [--rounds 3] [--steps 1000] [--large-steps 17]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from _results import record
from _timing import Repeated, train
from torch import nn

from lightning_hybrid import HybridGabraStrategy
from models import ResAttNet3D

STEPS = 1000
LARGE = "3D-ResAttNet-18"


def perceptron(dropout: float) -> nn.Module:
    layers = [m for _ in range(5) for m in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(dropout))]
    return nn.Sequential(*layers, nn.Linear(64, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "perceptron": (lambda: perceptron(0.0), (64,), 32),
    "perceptron, dropout": (lambda: perceptron(0.1), (64,), 32),
    LARGE: (lambda: ResAttNet3D(18), (1, 64, 64, 64), 4),
}


def run(name: str, verify: bool, steps: int, out: str) -> None:
    torch.manual_seed(0)
    make, shape, batch = NETWORKS[name]
    strategy = HybridGabraStrategy(
        pipeline_parallel_size=2, num_microbatches=2, verify="auto" if verify else False
    )
    seconds = train(make(), strategy, Repeated(shape, batch, steps + 1), 0)
    if seconds is not None:
        Path(out).write_text(json.dumps(seconds))


def step_times(name: str, verify: bool, steps: int) -> list[float]:
    """Seconds of each step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "steps.json")
        command = [sys.executable, __file__, "--run", name, "--steps", str(steps)]
        command += ["--out", str(out), *(["--verify"] if verify else [])]
        subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        found: list[float] = json.loads(out.read_text())
    return found[:steps]


def is_checked(call: int) -> bool:
    return call & (call - 1) == 0


def cost(seconds: list[float]) -> tuple[float, float]:
    """Seconds of a check and of a step without one."""
    calls = list(enumerate(seconds, 1))[1:]
    usual = statistics.median(s for call, s in calls if not is_checked(call))
    return statistics.mean(s - usual for call, s in calls if is_checked(call)), usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--large-steps", type=int, default=17)
    parser.add_argument("--run", choices=[*NETWORKS])
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run, arguments.verify, arguments.steps, arguments.out)
        return
    checks = sum(map(is_checked, range(1, STEPS + 1)))
    for name in NETWORKS:
        steps = arguments.large_steps if name == LARGE else arguments.steps
        found, ratios = [], []
        for number in range(arguments.rounds):
            with_it, without = (step_times(name, verify, steps) for verify in (True, False))
            check_s, step_s = cost(with_it)
            found.append(100 * checks * check_s / (STEPS * step_s))
            ratios.append(100 * (sum(with_it[1:]) / sum(without[1:]) - 1))
            print(
                f"{name}, round {number}: a step {1e3 * step_s:.2f} ms, a check "
                f"{1e3 * check_s:.1f} ms; {steps} steps in {sum(with_it[1:]):.2f} s, without "
                f"checks in {sum(without[1:]):.2f} s ({ratios[-1]:+.1f} %)",
                flush=True,
            )
        record({f"{name}: of {STEPS} steps": statistics.median(found)}, "%")
        how = "" if steps == STEPS else f" (from {steps} steps)"
        print(
            f"{name}: {checks} checks in {STEPS} steps cost {statistics.median(found):.2f} %{how}; "
            f"totals {statistics.median(ratios):+.1f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
