"""Replicas that do not wait for each other, where devices stall at random: time and test accuracy.

scikit-learn's digits, a perceptron, four replicas, SGD with momentum, five seeds (of weights, order
and stalls). The devices are simulated: a step sleeps 20 ms, and in one case of ten four times as
long. *synchronous* has ``replicas=Equal()``; of each bound of staleness the time and the
accuracy after the same number of samples stand beside it, with the standard deviation over seeds.
``--slow`` stalls nobody, and replica 0 sleeps twice as long in every step: there nothing is gained.

    OMP_NUM_THREADS=1 python benchmarks/asynchronous.py [--epochs 10] [--seeds 5] [--slow]
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from _results import record
from _timing import bare_trainer
from lightning.pytorch import LightningModule, seed_everything
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Asynchronous, HybridGabraStrategy

REPLICAS, STEP_S, BATCH = 4, 0.02, 16
KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    **{f"bound {n}": {"replicas": Asynchronous(staleness=n)} for n in (0, 1, 4, 8)},
}


class Digits(LightningModule):
    def __init__(self, seed: int, *, slow: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.seed, self.slow, self.starts = seed, slow, list[float]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.starts.append(time.perf_counter())
        dice = random.Random(f"{self.seed} {self.global_rank} {len(self.starts)}")
        often = 2 if self.slow and self.global_rank == 0 else 1
        time.sleep(STEP_S * (often if self.slow else dice.choice([4] + [1] * 9)))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(kind: str, seed: int, epochs: int, *, slow: bool) -> tuple[float, float]:
    """Seconds from the second step to the end of a fit, and the accuracy after it."""
    digits = load_digits()
    parts = train_test_split(digits.data / 16, digits.target, test_size=360, random_state=0)
    x, x_test, y, y_test = map(torch.as_tensor, parts)
    seed_everything(seed, verbose=False)
    module = Digits(seed, slow=slow)
    loader = DataLoader(TensorDataset(x.float(), y), BATCH, shuffle=True, drop_last=True)
    strategy = HybridGabraStrategy(data_parallel_size=REPLICAS, **KINDS[kind])
    folder = tempfile.gettempdir()
    trainer = bare_trainer(strategy, devices=REPLICAS, max_epochs=epochs, default_root_dir=folder)
    trainer.fit(module, loader)
    seconds = time.perf_counter() - module.starts[1]
    found = module.net(x_test.float()).argmax(1)
    return seconds, (found == y_test).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    found = {
        kind: [run(kind, seed, options.epochs, slow=options.slow) for seed in range(options.seeds)]
        for kind in KINDS
    }
    if int(os.environ.get("LOCAL_RANK", 0)):
        return
    for kind, runs in found.items():
        ratios = [s / base for (s, _), (base, _) in zip(runs, found["synchronous"])]
        print(f"{kind:12s} time {statistics.mean(ratios):.2f} of synchronous", end="")
        accuracies = [accuracy for _, accuracy in runs]
        print(f", accuracy {statistics.mean(accuracies):.4f} +- {statistics.stdev(accuracies):.4f}")
        for seed, (seconds, accuracy) in enumerate(runs):
            record({f"{kind}, seed {seed}, time": seconds}, "s")
            record({f"{kind}, seed {seed}, accuracy": accuracy}, "")


if __name__ == "__main__":
    main()
