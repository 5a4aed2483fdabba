"""Memory and time of a step under `schedule="1f1b"` beside `"gpipe"`: a GPT that returns its loss.

Claim: the peak of activations and logits is at most (S + 1) / M of that of fill-drain, for S stages
and M micro-batches, and a step takes at most 1.02 of its time. Each rank samples its resident
memory (on a GPU: what torch has allocated) while it trains; counted is the most of the measured
steps above the least of them, which is that of weights, gradients and optimizer. Of a rank that
goes back inside of calls the gradients that wait aside are taken off, as the plan counts them; they
are shown, too, and the processor time of a rank, which other work on the machine changes less than
that of a step. Schedules alternate; the median of each is shown.

    python benchmarks/one_f_one_b.py --stages 2
    python benchmarks/one_f_one_b.py --stages 4
    python benchmarks/one_f_one_b.py --width 128 --layers 4 --vocabulary 4096 --rounds 1  # small
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _gpt import Gpt
from _results import record
from _timing import bare_trainer, servers
from lightning.pytorch import Callback, LightningModule
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybrid import HybridGabraStrategy, Search

SCHEDULES = ("gpipe", "1f1b")
WARM_UP = 2
MIB = 2**20


class Module(LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.net = Gpt(options.width, options.layers, options.vocabulary, options.length)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)[0]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Times(Callback):
    """When steps begin, on the driver, and the memory of servers since the first one."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.servers: list[Memory] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.starts:
            self.servers = [Memory(process) for process in servers()]
        self.starts.append(time.time())


class Memory:
    """Samples what a process has, and its processor time, until it is stopped.

    Args:
        process: its number; ``None``: this one. (Of another one the GPU memory is not known.)
    """

    def __init__(self, process: int | None = None) -> None:
        self._process = process
        self.seen: list[tuple[float, float, float]] = []
        self._on = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        place = Path(f"/proc/{self._process or 'self'}")
        page, tick = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
        while self._on:
            if self._process is None and torch.cuda.is_available() and torch.cuda.is_initialized():
                size = float(torch.cuda.memory_allocated())
            else:
                size = float((place / "statm").read_text().split()[1]) * page
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            busy_s = (int(fields[11]) + int(fields[12])) / tick
            self.seen.append((time.time(), size / MIB, busy_s))
            time.sleep(0.002)

    def stop(self) -> list[tuple[float, float, float]]:
        self._on = False
        self._thread.join()
        return self.seen


def train(options: argparse.Namespace, folder: Path) -> None:
    """One run; a file is left for each of its ranks."""
    memory, times = Memory(), Times()
    torch.manual_seed(0)
    words = torch.randint(options.vocabulary, (options.batch, options.length))
    strategy = HybridGabraStrategy(
        pipeline_parallel_size=options.stages,
        num_microbatches=options.microbatches,
        schedule=options.schedule,
        search=Search(capacity=[1.0] * options.stages),  # so that both have the same cuts
        verify=False,
    )
    steps = WARM_UP + options.steps
    trainer = bare_trainer(
        strategy=strategy,
        devices=options.stages,
        max_steps=steps,
        callbacks=[times],
    )
    trainer.fit(Module(options), DataLoader(words.repeat(steps, 1), batch_size=options.batch))
    if times.starts:
        assert strategy.plan is not None, "a network that was trained has a plan"
        inside = strategy.plan.schedule == "1f1b"
        aside = {r.device: inside * (r.gradient_bytes or 0) / MIB for r in strategy.plan.rows}
        found = {"starts": times.starts[WARM_UP:], "aside": [aside[k] for k in sorted(aside)]}
        (folder / "driver.json").write_text(json.dumps(found))
    for rank, each in enumerate((memory, *times.servers)):
        (folder / f"{rank}.seen").write_text(json.dumps(each.stop()))


@dataclass
class Found:
    """What a run has taken.

    Attributes:
        step_s: seconds of a step.
        peaks: of each rank, of activations and logits, in MiB.
        aside: likewise, gradients that wait aside.
        busy_s: of each rank, seconds of its processors in a step.
    """

    step_s: float
    peaks: list[float]
    aside: list[float]
    busy_s: list[float]


def measured(options: argparse.Namespace, schedule: str) -> Found:
    """Train in processes of its own, and measure these."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--into", folder]
        # (memory of large tensors goes back to the system at once)
        limits = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        environment = os.environ | limits | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--schedule", schedule], check=True, env=environment)
        driver = json.loads((Path(folder) / "driver.json").read_text())
        starts, peaks, busy = driver["starts"], [], []
        for rank, aside in enumerate(driver["aside"]):
            seen = json.loads((Path(folder) / f"{rank}.seen").read_text())
            rows = [row for row in seen if starts[0] <= row[0] <= starts[-1]]
            _, sizes, processors = zip(*rows)
            peaks.append(max(sizes) - min(sizes) - aside)
            busy.append((processors[-1] - processors[0]) / (len(starts) - 1))
    durations = [later - start for start, later in pairwise(starts)]
    return Found(median(durations), peaks, driver["aside"], busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        *(("stages", 2), ("microbatches", 8), ("batch", 16), ("length", 256), ("width", 768)),
        *(("layers", 12), ("vocabulary", 32000), ("steps", 6), ("rounds", 3)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--into")
    options = parser.parse_args()
    if options.into:
        train(options, Path(options.into))
        return
    found: dict[str, list[Found]] = {name: [] for name in SCHEDULES}
    for _ in range(options.rounds):
        for schedule in SCHEDULES:
            found[schedule].append(measured(options, schedule))
    seconds = {name: median(run.step_s for run in runs) for name, runs in found.items()}
    peaks, busy = (
        {
            name: [median(each) for each in zip(*(getattr(run, column) for run in runs))]
            for name, runs in found.items()
        }
        for column in ("peaks", "busy_s")
    )
    table = Table("schedule", "step, s", "processors of ranks, s", "peaks, MiB", "gradients aside")
    for name in SCHEDULES:
        aside, times = found[name][0].aside, ", ".join(f"{s:.2f}" for s in busy[name])
        table.add_row(name, f"{seconds[name]:.3f}", times, _shown(peaks[name]), _shown(aside))
    Console().print(table)
    wanted = (options.stages + 1) / options.microbatches
    ratios = {
        "largest peak by gpipe": max(peaks["1f1b"]) / max(peaks["gpipe"]),
        "largest peak by gpipe, wanted": wanted,
        "busiest rank by gpipe": max(busy["1f1b"]) / max(busy["gpipe"]),
        "step by gpipe": seconds["1f1b"] / seconds["gpipe"],
        "step by gpipe, wanted": 1.02,
    }
    print(*(f"{name}: {value:.3g}" for name, value in ratios.items()), sep="\n")
    record(ratios, "")
    record({f"peak, {name}": max(peaks[name]) for name in SCHEDULES}, "MiB")


def _shown(sizes: list[float]) -> str:
    return ", ".join(f"{size:.0f}" for size in sizes)


if __name__ == "__main__":
    main()
