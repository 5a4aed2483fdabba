"""Predicted against measured step time: 3D-ResAttNet-18 and a transformer encoder on two processes.

Claim: on configurations that it has not seen, the plan's prediction with a fitted performance model
on top is off by 12 % on average at most, and the plan that is predicted to be the fastest takes at
most 1.05 times what the fastest one took. A configuration is a network, a batch and numbers of
replicas, stages, stages per device and micro-batches. One script trains them one after the other,
each for a few steps; two replicas are predicted as the start of a run with automatic sizes says.

    python benchmarks/prediction.py [--steps 10] [--out runs.csv]
"""

import argparse
import csv
import logging
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _results import record
from _timing import Clock, Module, Repeated, bare_trainer, durations
from torch import Tensor, nn

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.__main__ import main as command
from models import ResAttNet3D

WARM_UP = 3
LENGTH, WIDTH = 128, 256
CHOSEN = re.compile(r"2 replicas.*?Predicted step: ([\d.e+-]+) (s|ms) ")


class Encoder(nn.Module):
    """Six layers of torch's own transformer, and a head on the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


NETWORKS = {
    "3D-ResAttNet-18": (lambda: ResAttNet3D(18), (1, 48, 48, 48), (4, 8)),
    "encoder": (Encoder, (LENGTH, WIDTH), (8, 16)),
}
Row = dict[str, Any]


class Lines(logging.Handler):
    """Keeps what Lightning says."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"


def fit(name: str, batch: int, steps: int, **sizes: Any) -> tuple[float, Any] | None:
    """Train; on rank 0 the median seconds of a step, and the strategy."""
    make, shape, _ = NETWORKS[name]
    torch.manual_seed(0)
    clock = Clock()
    trainer = bare_trainer(
        HybridGabraStrategy(**sizes),
        devices=2,
        max_epochs=1,
        callbacks=[clock],
        use_distributed_sampler=False,
    )
    trainer.fit(Module(make()), Repeated(shape, batch, steps + WARM_UP + 1).loader())
    if not trainer.is_global_zero:
        return None
    return statistics.median(durations(clock.starts, WARM_UP)), trainer.strategy


def replicas_s(name: str, batch: int) -> float:
    """What two replicas are predicted to take, as a run with automatic sizes says."""
    lines = Lines()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(lines)
    fit(name, batch, steps=1)
    logger.removeHandler(lines)
    found = CHOSEN.search(lines.text)
    return float("nan") if found is None else float(found[1]) / (1000 if found[2] == "ms" else 1)


def rows(steps: int) -> Iterator[Row]:
    for name, (_, _, batches) in NETWORKS.items():
        for batch in batches:
            row = {"network": name, "batch": batch, "replicas": 2, "stages": 1}
            row |= {"stages_per_device": 1, "microbatches": 1}
            predicted_s = replicas_s(name, batch)
            found = fit(name, batch, steps, data_parallel_size=2, pipeline_parallel_size=1)
            if found is not None:
                yield row | {"predicted_s": predicted_s, "step_s": found[0]}
            for turns, microbatches in product((1, 2), (1, 2, 4)):
                found = fit(
                    name,
                    batch,
                    steps,
                    pipeline_parallel_size=2,
                    num_microbatches=microbatches,
                    schedule="gpipe" if turns == 1 else "looped",
                    contiguous=turns == 1,
                )
                if found is not None:
                    step_s, strategy = found
                    sizes = {"replicas": 1, "stages": 2, "microbatches": microbatches}
                    sizes["stages_per_device"] = strategy.plan.stages // 2
                    times = {"predicted_s": strategy.plan.step_s, "step_s": step_s}
                    yield row | sizes | times


def report(found: list[Row]) -> None:
    off = [abs(row["predicted_s"] / row["step_s"] - 1) for row in found]
    record({"mean error, nothing fitted": 100 * statistics.mean(off)}, "%")
    print(f"{len(found)} configurations; the prediction alone is off by {statistics.mean(off):.1%}")
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in found:
        groups[row["network"], row["batch"]].append(row)
    for (name, batch), group in groups.items():
        chosen = min(group, key=lambda row: row["predicted_s"] / row["replicas"])
        best_s = min(row["step_s"] / row["replicas"] for row in group)
        ratio = chosen["step_s"] / chosen["replicas"] / best_s
        print(f"{name}, batch {batch}: the chosen one takes {ratio:.2f} of the fastest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Row] = []
    for row in rows(arguments.steps):
        found.append(row)
        print(*row.values(), flush=True)
        with arguments.out.open("w", newline="") as file:  # a run that is cut short leaves its rows
            writer = csv.DictWriter(file, found[0])
            writer.writeheader()
            writer.writerows(found)
    if not found:  # not rank 0
        return
    report(found)
    command(["fit-model", str(arguments.out), "--intrinsic", "predicted_s"])


if __name__ == "__main__":
    main()
