"""Seconds of a steady training step with this checkout, and with that of another commit.

Run: python benchmarks/against_commit.py COMMIT [--rounds 12] [--steps 10] [NETWORK ...]

Claim: a change of the package that is no feature makes no step slower than 1.02 times. Both
versions train the same network with the same cut in two processes each, of one thread. When both
have trained their first steps, in which networks are captured, planned and checked, they take
turns: one trains a block of steps while the other one waits, so that other work on the machine hits
both alike. Which one begins changes with each round. Compared are the medians of all their steps.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _results import record
from _timing import Module, Repeated, bare_trainer
from lightning.pytorch import Callback
from torch import Tensor, nn

import lightning_hybrid
from lightning_hybrid import HybridGabraStrategy
from models import ResAttNet3D

ROOT = Path(__file__).parents[1]
WARM_UP = 20


class Transformer(nn.Module):
    """An encoder of four layers, which reads a row of 32 vectors and gives one answer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.encoder(x).mean(1))
        return answer


def tiny_layers() -> nn.Module:
    pairs = [(nn.Linear(16, 16), nn.Tanh()) for _ in range(40)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair], nn.Linear(16, 2))


@dataclass(frozen=True)
class Case:
    """A network, the shape of one input, the size of a batch, and the first layer of stage 1."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    cut: str


CASES = {
    "3D-ResAttNet-18": Case(lambda: ResAttNet3D(18), (1, 32, 32, 32), 6, "layer1.1"),
    "40 tiny layers": Case(tiny_layers, (16,), 8, "40"),
    "transformer": Case(Transformer, (32, 64), 8, "encoder.layers.2"),
}


# ---------------------------------------------------------------- in the process of one version


class Turns(Callback):
    """Trains a block of steps for each line of standard input, and prints the steps' seconds."""

    def __init__(self, steps: int) -> None:
        self._steps, self._starts = steps, list[float]()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= WARM_UP and len(self._starts) > self._steps:
            print(json.dumps([b - a for a, b in pairwise(self._starts)]), flush=True)
            if not sys.stdin.readline():  # no more turns
                trainer.should_stop = True
            self._starts = []  # (the wait is no step's)
        self._starts.append(time.perf_counter())


def train(name: str, steps: int, checkout: str) -> None:
    found = str(Path(lightning_hybrid.__file__).parents[1])
    if found != checkout:
        raise SystemExit(f"lightning_hybrid was imported from {found}, and not from {checkout}")
    torch.manual_seed(0)
    case = CASES[name]
    strategy = HybridGabraStrategy(
        pipeline_parallel_size=2, num_microbatches=2, plan=[f"net.{case.cut}"]
    )
    trainer = bare_trainer(strategy, devices=2, max_epochs=1, callbacks=[Turns(steps)])
    trainer.fit(Module(case.make()), Repeated(case.shape, case.batch, 1_000_000).loader())


# ---------------------------------------------------------------- in the process that compares


@contextmanager
def checkout_of(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        files = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=files.stdout, check=True)
        yield Path(folder).resolve()


class Version:
    """One version, in processes of its own, which has trained its first steps.

    Args:
        name: of the network.
        checkout: the folder that it is imported from.
        steps: of a block.
    """

    def __init__(self, name: str, checkout: Path, steps: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, "-", name, "--steps", str(steps)]
        self._process = subprocess.Popen(
            [*command, "--checkout", str(checkout)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def block(self) -> list[float]:
        """The seconds of the steps of one block, which is trained now."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> list[float]:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("["):
                seconds: list[float] = json.loads(line)
                return seconds
        raise SystemExit(f"{shlex.join(map(str, self._process.args))} ended without an answer")

    def end(self) -> None:
        self._process.communicate(timeout=60)


def compare(name: str, checkouts: Sequence[Path], rounds: int, steps: int) -> list[float]:
    """The median seconds of a step of each version."""
    versions = [Version(name, checkout, steps) for checkout in checkouts]
    seconds: list[list[float]] = [[] for _ in versions]
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            seconds[index] += versions[index].block()
    for each in versions:
        each.end()
    return [statistics.median(values) for values in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", help="whose files are the other version")
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--checkout", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.checkout:
        train(arguments.networks[0], arguments.steps, arguments.checkout)
        return
    with checkout_of(arguments.commit) as other:
        for name in arguments.networks or CASES:
            here, there = compare(name, (ROOT, other), arguments.rounds, arguments.steps)
            record({f"{name}, this checkout": here, f"{name}, the other": there}, "s")
            print(f"{name}: {here:.4f} s, {arguments.commit} {there:.4f} s", end="", flush=True)
            print(f", {here / there:.3f} times (claim: at most 1.02)", flush=True)


if __name__ == "__main__":
    main()
