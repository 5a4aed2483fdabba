"""Test accuracy under every schedule: what delayed gradients cost, measured.

scikit-learn's digits, a perceptron of eight linear layers in four stages, five seeds. A seed is of
weights and order; the split stays. Of each run the accuracy after the last epoch counts, without
any choice by validation. The table has, beside the mean over seeds, the mean of the differences to
``gpipe`` (which has the numbers of one device) of the same seed, and its 95 % interval by Student's
t.

Each run leaves a line in ``--out``; a script that was stopped goes on.

    OMP_NUM_THREADS=1 python benchmarks/schedule_accuracy.py --out digits.jsonl
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from _timing import asked, bare_trainer

from lightning_hybrid import HybridGabraStrategy

EXACT = ("gpipe", "looped", "zero_bubble", "1f1b_stream")
DELAYED = ("pipedream", "ddg", "fdg", "akintoye")
WINDOW = 4
"""Batches of which 1F1B accumulates the gradients: each has a fourth of the samples."""
STAGES, EPOCHS = 4, 15


class Digits(LightningModule):
    """Eight linear layers; plain gradient descent, which the formulas of all schedules know."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [
            layer for _ in range(7) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())
        ]
        self.net = nn.Sequential(*hidden, nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        found = self.net(batch[0]).argmax(1)
        self.log("accuracy", (found == batch[1]).double().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def digits(batch: int, seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """1,408 digits to train with (44 batches of 32, or windows of 1F1B), 360 to test."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=360, random_state=0, stratify=y)
    tensors = [torch.tensor(part) for part in parts]
    train = TensorDataset(tensors[0][:1408].float(), tensors[2][:1408])
    test = TensorDataset(tensors[1].float(), tensors[3])
    order = torch.Generator().manual_seed(seed)
    return (
        DataLoader(train, batch, shuffle=True, generator=order, num_workers=1),
        DataLoader(test, 90),
    )


def run(schedule: str, seed: int) -> float | None:
    """One run on all its processes; the first one has the accuracy."""
    torch.set_num_threads(1)
    seed_everything(seed, verbose=False)
    window = WINDOW if schedule == "1f1b_stream" else 1
    batched = {"num_microbatches": 2} if schedule in EXACT and window == 1 else {}
    strategy = HybridGabraStrategy(
        data_parallel_size=1, pipeline_parallel_size=STAGES, schedule=asked(schedule), **batched
    )
    trainer = bare_trainer(
        strategy, devices=STAGES, max_epochs=EPOCHS, accumulate_grad_batches=window
    )
    train, test = digits(32 // window, seed)
    model = Digits()
    trainer.fit(model, train)
    [metrics] = trainer.test(model, test, verbose=False)
    return metrics["accuracy"] if trainer.is_global_zero else None


def table(rows: Sequence[dict[str, Any]], schedules: Sequence[str]) -> None:
    """Mean over seeds, and mean difference to ``gpipe`` with its interval."""
    of = {(row["schedule"], row["seed"]): row["accuracy"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    print(f"{'':12}{'mean':>8}{'least':>8}{'most':>8}{'difference to gpipe (95 %)':>34}")
    for name in schedules:
        found = torch.tensor([of[name, seed] for seed in seeds], dtype=torch.float64)
        apart = found - torch.tensor([of["gpipe", s] for s in seeds], dtype=torch.float64)
        half = float(apart.std() * stats.t.ppf(0.975, len(seeds) - 1) / len(seeds) ** 0.5)
        mean = float(apart.mean())
        print(
            f"{name:12}{found.mean():8.4f}{found.min():8.4f}{found.max():8.4f}"
            f"{mean:14.4f} ({mean - half:+.4f} to {mean + half:+.4f})"
        )


def study(
    out: Path,
    schedules: Sequence[str],
    seeds: Sequence[int],
    run: Callable[[str, int], float | None],
) -> None:
    """Every schedule with every seed, but those that `out` has already; then the table.

    Args:
        out: has a line for each run.
        schedules: their names, ``gpipe`` among them.
        seeds: of weights and order.
        run: trains on all processes; returns the accuracy on the first one.
    """
    # all processes run this script, and read here what is done already
    lines = out.read_text().splitlines() if out.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["schedule"], row["seed"]) for row in rows}
    for seed in seeds:
        for name in schedules:
            if (name, seed) in done:
                continue
            accuracy = run(name, seed)
            if accuracy is not None:
                rows.append({"schedule": name, "seed": seed, "accuracy": accuracy})
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    if not os.environ.get("LOCAL_RANK", "0").strip("0"):
        table(rows, schedules)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("schedule_accuracy.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="*", default=range(1, 6))
    chosen = parser.parse_args()
    study(chosen.out, (*EXACT, *DELAYED), chosen.seeds, run)
