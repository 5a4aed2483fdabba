"""CPU time that a training step costs the threads of driver and worker, beside plain Lightning.

Claim: at most 1.5 ms + 0.5 ms per micro-batch above plain at 1,000 tensors, clipping included.

Linear layers of width 8 in two equal stages: nearly all of a step is the host's work. Plain is one
device on which the network's call is ``torch.cat([net(part) for part in x.chunk(M)])``, so that all
three threads run the same kernels; "above" is driver and worker together without plain. Taken is
the CPU time of the thread that trains (it does not count while it waits), the median of the steps
after the first ones; without the check of calls, which is in few steps (`verify_cost.py`).

    python benchmarks/host_cost.py [--tensors 10 100 1000] [--microbatches 1 4 16] [--steps 20]
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _results import record
from _timing import bare_trainer, computed_s, servers
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraStrategy

WIDTH, BATCH, WARM_UP = 8, 16, 6
EXTRAS = ("", "clipping", "scheduler", "16-mixed", "logging")


class Host(LightningModule):
    """Notes at each batch how long this thread has computed."""

    def __init__(self, tensors: int, microbatches: int, extra: str) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2)]
        self.net = nn.Sequential(*layers)
        self.microbatches, self.extra = microbatches, extra
        self.seen: list[float] = []
        self.of_worker: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(time.thread_time())
        self.of_worker += [computed_s(process) for process in servers()]
        parts = batch[0].chunk(self.microbatches)
        loss = torch.cat([self.net(part) for part in parts]).square().mean()
        if self.extra == "logging":
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3, foreach=True)
        if self.extra != "scheduler":
            return optimizer
        each = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": each, "interval": "step"}}


def train(stages: int, tensors: int, microbatches: int, extra: str, steps: int, out: Path) -> None:
    """Train, and leave the median of the milliseconds of a step in a file for each rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options: dict[str, Any] = {"max_steps": steps + WARM_UP, "devices": stages}
    if extra == "clipping":
        options["gradient_clip_val"] = 0.1
    if extra == "16-mixed":
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    if extra == "logging":
        options |= {"logger": CSVLogger(out), "log_every_n_steps": 1}
    if extra == "scheduler":
        options |= {"logger": CSVLogger(out), "callbacks": [LearningRateMonitor("step")]}
    strategy: Any = "auto"
    # (the strategy makes the micro-batches of the whole batch itself)
    module = Host(tensors, 1 if stages > 1 else microbatches, extra)
    if stages > 1:
        middle = [f"net.{tensors // 4}"]
        strategy = HybridGabraStrategy(
            data_parallel_size=1,
            pipeline_parallel_size=stages,
            num_microbatches=microbatches,
            plan=middle,
            verify=False,
        )
    trainer = bare_trainer(strategy, **options)
    inputs = torch.randn(BATCH * (steps + WARM_UP), WIDTH)
    trainer.fit(module, DataLoader(TensorDataset(inputs), BATCH))
    found = {"plain" if stages == 1 else "driver": module.seen, "worker": module.of_worker}
    for kind, seen in found.items():
        taken = [1e3 * (b - a) for a, b in zip(seen[WARM_UP:], seen[WARM_UP + 1 :])]
        if taken:
            (out / f"{kind}.json").write_text(json.dumps(statistics.median(taken)))


def measured(tensors: int, microbatches: int, extra: str, steps: int) -> dict[str, float]:
    """Milliseconds of plain, driver and worker."""
    with tempfile.TemporaryDirectory() as folder:
        for stages in (1, 2):
            values = (stages, tensors, microbatches, extra, steps, folder)
            subprocess.run([sys.executable, __file__, "--run", json.dumps(values)], check=True)
        return {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--extras", nargs="*", default=EXTRAS, choices=EXTRAS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        *values, out = json.loads(arguments.run)
        train(*values, Path(out))
        return
    print("tensors   M  with         plain   driver   worker    above  wanted  (ms)")
    for tensors in arguments.tensors:
        for microbatches in arguments.microbatches:
            for extra in arguments.extras:
                found = measured(tensors, microbatches, extra, arguments.steps)
                above = found["driver"] + found["worker"] - found["plain"]
                print(
                    f"{tensors:7} {microbatches:3}  {extra or '-':10}"
                    + "".join(f"{found[kind]:9.2f}" for kind in ("plain", "driver", "worker"))
                    + f"{above:9.2f}{1.5 + 0.5 * microbatches:8.1f}",
                    flush=True,
                )
                name = f"{tensors} tensors, M = {microbatches}, {extra or 'plain'}"
                record({f"{name}: {kind}": value for kind, value in found.items()}, "ms")


if __name__ == "__main__":
    main()
