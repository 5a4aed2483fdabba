"""What a torchmetrics object costs in a LightningModule that is called as ``self(x)``.

Claim: at least 0.9 of the steps per second of the same without it, for 60 layers under two stages.
The metric's state is attributes of the network that is captured, and changes in every step; if a
step were captured again for that, it would be 40 times slower. It is updated in ``training_step``,
or in ``forward``, where it branches on values: then the module runs its own Python on the driver,
and ``self.net`` is what is cut. The variants alternate, two processes with one thread each.

    python benchmarks/metric_cost.py [--rounds 5] [--steps 200]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _results import record
from _timing import Clock, Module, Repeated, bare_trainer, durations
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_hybrid import HybridGabraStrategy

LAYERS, WIDTH, BATCH, WARM_UP = 60, 64, 32, 20
VARIANTS = ("no metric", "in training_step", "in forward")


class Counted(Module):
    """A stack of layers, which is its own network, and a metric."""

    def __init__(self, variant: str) -> None:
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS - 1))
        super().__init__(nn.Sequential(*blocks, nn.Linear(WIDTH, 2)))
        self.variant = variant
        if variant != VARIANTS[0]:
            self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        if self.variant == "in forward":
            self.mean.update(x.detach())
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        if self.variant == "in training_step":
            self.mean.update(loss.detach())
        return loss


def run(variant: str, steps: int, out: str) -> None:
    torch.manual_seed(0)
    clock = Clock()
    trainer = bare_trainer(
        strategy=HybridGabraStrategy(
            pipeline_parallel_size=2,
            num_microbatches=2,
            plan=[f"net.{LAYERS // 2}"],
        ),
        devices=2,
        max_epochs=1,
        callbacks=[clock],
    )
    trainer.fit(Counted(variant), Repeated((WIDTH,), BATCH, steps + WARM_UP).loader())
    if trainer.is_global_zero:
        Path(out).write_text(json.dumps(durations(clock.starts, WARM_UP)))


def median_step(variant: str, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/steps.json"
        command = [sys.executable, __file__, "--run", variant, "--steps", str(steps), "--out", out]
        done = subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{variant!r} ended with code {done.returncode}:\n{done.stderr}")
        return statistics.median(json.loads(Path(out).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run", choices=VARIANTS)
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run, arguments.steps, arguments.out)
        return
    rows: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(arguments.rounds):
        for variant, times in rows.items():
            times.append(median_step(variant, arguments.steps))
        print(
            f"round {number}: " + ", ".join(f"{k} {1e3 * v[-1]:.2f} ms" for k, v in rows.items()),
            flush=True,
        )
    plain, *others = (statistics.median(times) for times in rows.values())
    record(dict(zip(VARIANTS, (1 / plain, *(1 / step_s for step_s in others)))), "steps/s")
    print(f"{LAYERS} layers, two stages: {1 / plain:.1f} steps/s without a metric")
    for variant, step_s in zip(VARIANTS[1:], others):
        print(f"  {variant}: {1 / step_s:.1f} steps/s, {plain / step_s:.3f} of that (at least 0.9)")


if __name__ == "__main__":
    main()
