"""Test accuracy on the synthetic AD/NC cohort: exact gradients beside delayed ones.

3D-ResAttNet-18 of half the demo's width in three stages, plain gradient descent (which the formulas
of all schedules know), no micro-batches, so that batch normalisation sees the same batches under
each schedule. A seed is of weights and order; cohort and split stay. Of each run the accuracy on
the 40 held-out subjects after the last epoch counts, without any choice by validation.

Each run leaves a line in ``--out``; a script that was stopped goes on.

    python -m datamodules synth demo/adni --subjects 330 --resolution 4
    OMP_NUM_THREADS=1 python benchmarks/cohort_accuracy.py --root demo/adni
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import seed_everything

sys.path.insert(0, str(Path(__file__).parents[1]))

from _adni import cohort
from _timing import asked, bare_trainer
from schedule_accuracy import study

from lightning_hybrid import HybridGabraStrategy
from models import ResAttNetClassifier

SCHEDULES = ("gpipe", "fdg", "akintoye")
STAGES = 3


def run(root: Path, epochs: int, learning_rate: float, schedule: str, seed: int) -> float | None:
    """One run on all its processes; the first one has the accuracy."""
    torch.set_num_threads(1)
    seed_everything(seed, verbose=False)
    batched = {"num_microbatches": 1} if schedule == "gpipe" else {}
    strategy = HybridGabraStrategy(
        data_parallel_size=1, pipeline_parallel_size=STAGES, schedule=asked(schedule), **batched
    )
    trainer = bare_trainer(
        strategy, devices=STAGES, max_epochs=epochs, num_sanity_val_steps=0, limit_val_batches=0
    )
    model = ResAttNetClassifier(
        widths=[32, 64, 128, 256],
        optimizer="sgd",
        momentum=0.0,
        nesterov=False,
        weight_decay=0.0,
        learning_rate=learning_rate,
    )
    data = cohort(root, num_workers=1)  # streamed schedules want one
    trainer.fit(model, datamodule=data)
    [metrics] = trainer.test(model, datamodule=data, verbose=False)
    return metrics["test/accuracy"] if trainer.is_global_zero else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("demo/adni"))
    parser.add_argument("--out", type=Path, default=Path("cohort_accuracy.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    chosen = parser.parse_args()
    once = partial(run, chosen.root, chosen.epochs, chosen.learning_rate)
    study(chosen.out, SCHEDULES, chosen.seeds, once)
