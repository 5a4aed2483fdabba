"""What several stages on a device bring, and what they cost: 3D-ResAttNet-18 in two processes.

Three placements of the same network with 3 micro-batches of 2, one thread each: the planner's
*chain* of two stages; a *loop* of four balanced stages that take turns on the two devices, which
fills and drains in half the time; and what GABRA makes of *free* placements. Predicted by the
simulator, measured in real steps, the placements alternating.

    python benchmarks/free_placements.py [--rounds 3] [--steps 6]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from _timing import Repeated, train
from placements import MICROBATCHES, NETWORKS, SIZE, Chain, plan, profile
from rich.console import Console
from rich.table import Table

from lightning_hybrid import HybridGabraStrategy, Plan
from lightning_hybrid.planning.planner import BANDWIDTH_BYTES_PER_S
from lightning_hybrid.planning.simulate import simulate
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules.gpipe import gpipe

NETWORK = "resattnet18"
BANDWIDTH = BANDWIDTH_BYTES_PER_S["gloo"]
WARM_UP = 3


def loop(chain: Chain) -> Plan:
    """Four stages, balanced as for four devices, on two."""
    four = plan(chain, 4)
    placed = replace(four, devices=(1, 0, 1, 0), capacities=(), rows=())
    ends = [*accumulate(len(row.partitions) for row in four.rows)]
    starts = [0, *ends[:-1]]
    forward_s, backward_s = (
        [sum(times[a:b]) for a, b in zip(starts, ends)]
        for times in (chain.forward_s, chain.backward_s)
    )
    send_s = [chain.cut_bytes[end - 1] / BANDWIDTH for end in ends[:-1]]
    costs = StepCosts(forward_s, backward_s, placed.devices, send_s)
    timeline = simulate(gpipe(4, MICROBATCHES), costs)
    return replace(placed, predicted_step_s=timeline.makespan_s)


def run(path: str, steps: int, out: str) -> None:
    torch.manual_seed(0)
    build, shape = NETWORKS[NETWORK]
    inputs = Repeated(shape, SIZE * MICROBATCHES, steps + WARM_UP + 1)
    seconds = train(build(), HybridGabraStrategy(plan=path), inputs, WARM_UP)
    if seconds is not None:
        Path(out).write_text(json.dumps(seconds))


def step_s(placed: Plan, steps: int) -> list[float]:
    """Seconds of each step, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = f"{folder}/plan.json", f"{folder}/steps.json"
        placed.save(path)
        done = subprocess.run(
            [sys.executable, __file__, "--plan", path, "--steps", str(steps), "--out", out],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{placed.devices} ended with {done.returncode}:\n{done.stderr}")
        seconds: list[float] = json.loads(Path(out).read_text())
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plan")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    if arguments.plan:
        run(arguments.plan, arguments.steps, arguments.out)
        return
    torch.set_num_threads(1)
    chain = profile(NETWORK)
    plans = {
        "chain": plan(chain, 2),
        "loop": loop(chain),
        "free": plan(chain, 2, contiguous=False),
    }
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(arguments.rounds):
        for name, placed in plans.items():
            times[name] += step_s(placed, arguments.steps)
    table = Table("placement", "devices of the stages", "predicted, s", "median, s", "least, s")
    for name, placed in plans.items():
        devices = " ".join(map(str, placed.devices))
        median, least = statistics.median(times[name]), min(times[name])
        predicted = f"{placed.predicted_step_s:.3f}"
        table.add_row(name, devices, predicted, f"{median:.3f}", f"{least:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
