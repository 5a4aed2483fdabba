"""Every schedule beside plain ``ddp``, on two processes of one thread each, in alternating runs.

A run trains 3D-ResAttNet-18 (or, with ``--network perceptron``, a wide perceptron, whose gradients
are large and whose activations are small) and prints the mean time from one batch to the next,
over all batches but the first ones. ``ddp`` has half of each batch on either process. 1F1B gets
windows of four batches. ``--schedules`` chooses, ``--side`` and ``--batches`` make it shorter;
``--microbatches`` is the number of micro-batches under `gpipe`, `looped` and `zero_bubble`. The
micro-batches of the others are whole batches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from _results import record
from _timing import Clock, Module, Repeated, asked, bare_trainer
from torch import nn

from lightning_hybrid import HybridGabraStrategy
from models import ResAttNet3D

DEVICES, BATCH, WINDOW, WARM_UP = 2, 6, 4, 4
BATCH_SCHEDULES = ("gpipe", "looped", "zero_bubble")
SCHEDULES = (*BATCH_SCHEDULES, "1f1b_stream", "pipedream", "fdg", "akintoye")


def perceptron() -> nn.Module:
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(4096, 1024), *layers, nn.Linear(1024, 2))


class Plain(Module):
    """With the optimizer that the formulas of all schedules know."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def strategy_of(name: str, microbatches: int) -> Any:
    if name == "ddp":
        return "ddp"
    batched = {"num_microbatches": microbatches} if name in BATCH_SCHEDULES else {}
    return HybridGabraStrategy(pipeline_parallel_size=DEVICES, schedule=asked(name), **batched)


def run(name: str, config: dict[str, Any]) -> None:
    """One run, on both processes; the first one prints seconds per batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if config["network"] == "perceptron":
        network, shape = perceptron(), (4096,)
    else:
        network, shape = ResAttNet3D(18), (1, *[config["side"]] * 3)
    samples = BATCH // DEVICES if name == "ddp" else BATCH
    # a sampler of `ddp` divides the samples over the processes
    steps = config["batches"] * (DEVICES if name == "ddp" else 1)
    inputs, clock = Repeated(shape, samples, steps), Clock()
    trainer = bare_trainer(
        strategy=strategy_of(name, config["microbatches"]),
        devices=DEVICES,
        max_epochs=1,
        accumulate_grad_batches=WINDOW if name == "1f1b_stream" else 1,
        callbacks=[clock],
    )
    trainer.fit(Plain(network), inputs.loader(workers=1))
    if trainer.is_global_zero:
        starts = clock.starts[WARM_UP:]
        print(f"seconds {(starts[-1] - starts[0]) / (len(starts) - 1)}")


def measured_s(name: str, config: dict[str, Any]) -> float:
    """A run in processes of its own."""
    root = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, __file__, "--run", name, "--config", json.dumps(config)],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}", "PYTHONWARNINGS": "ignore"},
        cwd=root / "benchmarks",
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("seconds ")]
    if ended.returncode or not found:
        sys.exit(f"{name} has failed:\n{ended.stdout}\n{ended.stderr}")
    return float(found[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=["resattnet", "perceptron"], default="resattnet")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument(
        "--microbatches",
        type=int,
        default=3,
        help=f"of a batch, under {', '.join(BATCH_SCHEDULES)}; default 3",
    )
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--schedules",
        nargs="*",
        default=SCHEDULES,
        metavar="NAME",
        help=f"beside ddp; default: {' '.join(SCHEDULES)}",
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        run(chosen.run, json.loads(chosen.config))
        sys.exit()
    names = ["ddp", *chosen.schedules]
    spent_s: dict[str, list[float]] = {name: [] for name in names}
    keys = ("network", "side", "microbatches", "batches")
    config = {key: getattr(chosen, key) for key in keys}
    for _ in range(chosen.rounds):
        for name in names:
            spent_s[name].append(measured_s(name, config))
    record({name: statistics.median(times) for name, times in spent_s.items()}, "s")
    reference_s = statistics.median(spent_s["ddp"])
    print(f"{'':12}{'median':>9}{'least':>9}{'most':>9}   x ddp")
    for name, times in spent_s.items():
        median_s = statistics.median(times)
        print(
            f"{name:12}{median_s:9.3f}{min(times):9.3f}{max(times):9.3f}"
            f"{median_s / reference_s:8.2f}"
        )
