"""Seconds to the first step of the networks of `networks.py`, with two stages and on one device.

Each run is a Trainer in processes of its own, with one thread each: three steps of plain gradient
descent on batches of four, which are not divided; under ``hybrid_gabra`` with an empty cache of
profiles. "First step" is from the setup hooks to the end of the first training step, imports not
counted. The limit is 3 x one device + 10 s. Beside it stands by how much the loss of any step
differs from one device's, relative to it; the stages of networks that draw random numbers, as for
dropout, draw others, and these losses are not compared.

    python benchmarks/networks_first_steps.py [NAME ...]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _results import record
from _timing import bare_trainer
from lightning.pytorch import Callback, LightningModule
from networks import NETWORKS, Case
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid._trees import tensors_in

CASES = {name: case for cases in NETWORKS.values() for name, case in cases.items()}
KINDS = ("one device", "two stages")
BATCH, STEPS, LIMIT_S = 4, 3, 600
HEADER = (
    "| network | one device | two stages | limit | difference of losses |\n"
    "| --- | --- | --- | --- | --- |"
)


class Module(LightningModule):
    """Trains a network on the mean square of what it returns."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = case.make()
        self.losses: list[float] = []
        self.draws = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        args, kwargs = batch
        before = torch.get_rng_state()
        found = [t for _, t in tensors_in(self.net(*args, **kwargs)) if t.requires_grad]
        loss = torch.stack([t.square().mean() for t in found]).sum()
        self.losses.append(loss.item())
        self.draws |= not torch.equal(torch.get_rng_state(), before)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """The seconds of the first step."""

    def setup(self, *_: Any, **__: Any) -> None:
        self.since = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            self.first_step_s = time.perf_counter() - self.since


def run(name: str, kind: str, out: Path) -> None:
    """The script of one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case, clock, hybrid = CASES[name], Clock(), kind != KINDS[0]
    module = Module(case)

    def batch(samples: list[int]) -> Any:
        torch.manual_seed(samples[0])
        return case.arguments(BATCH)

    numbers: Any = range(BATCH * STEPS)
    strategy = HybridGabraStrategy(pipeline_parallel_size=2, num_microbatches=1)
    trainer = bare_trainer(
        strategy=strategy if hybrid else "auto",
        devices=2 if hybrid else 1,
        max_epochs=1,
        callbacks=[clock],
    )
    trainer.fit(module, DataLoader(numbers, batch_size=BATCH, collate_fn=batch))
    if trainer.is_global_zero:
        out.write_text(json.dumps([clock.first_step_s, module.losses, module.draws]))


def found(name: str, kind: str) -> tuple[float, list[float], bool] | str:
    """Seconds of the first step, the losses and whether it draws; or the last line of an error."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, name, "--run", kind, "--out", str(out)]
        more = {"OMP_NUM_THREADS": "1", "LIGHTNING_HYBRID_CACHE": folder}
        done = subprocess.run(
            command, env=os.environ | more, capture_output=True, text=True, timeout=LIMIT_S
        )
        if not out.exists():
            lines = [line for line in done.stderr.splitlines() if "Error" in line]
            return (lines or ["no result"])[-1]
        first_s, losses, draws = json.loads(out.read_text())
        return first_s, losses, draws


def line(name: str) -> str:
    """A row of the table."""
    one, two = (found(name, kind) for kind in KINDS)
    if isinstance(one, str) or isinstance(two, str):
        return f"| {name} | {one if isinstance(one, str) else f'{one[0]:.1f} s'} | {two} | | |"
    record({f"{name}: one device": one[0], f"{name}: two stages": two[0]}, "s")
    limit_s = 3 * one[0] + 10
    away = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one[1], two[1], strict=True))
    text = f"{two[0]:.1f} s" if two[0] <= limit_s else f"**{two[0]:.1f} s**"
    difference = "draws" if one[2] else f"{away:.0e}"
    return f"| {name} | {one[0]:.1f} s | {text} | {limit_s:.1f} s | {difference} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="networks; default: all")
    parser.add_argument("--run", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - CASES.keys():
        parser.error(f"no network is called {sorted(unknown)}; there are {list(CASES)}")
    if chosen.run:
        run(chosen.names[0], chosen.run, chosen.out)
        return
    print(HEADER)
    for name in chosen.names or CASES:
        print(line(name), flush=True)


if __name__ == "__main__":
    main()
