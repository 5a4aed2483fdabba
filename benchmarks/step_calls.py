"""What Python does in one steady training step, on the driver: calls, functions, files.

Run: python benchmarks/step_calls.py [--list]

A perceptron of five layers in two stages trains on batches of one shape; its seventh step is
counted, from the strategy's ``training_step`` to the end of the optimizer's step. Counted are calls
of functions whose code is in ``lightning_hybrid``, the different functions among them, the files
these are in, and how often a call leads from one file to another one. ``network`` counts the same
for the call of the network alone, from the user's line to its return.
"""

import argparse
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid
from lightning_hybrid import HybridGabraStrategy

PACKAGE = str(Path(lightning_hybrid.__file__).parent)
COUNTED, STEPS = 6, 8  # the check of the captured network is in steps 0, 1, 3 and 7


class Calls:
    """Counts calls between :meth:`begin` and :meth:`end`, in this thread."""

    def __init__(self) -> None:
        self.functions: Counter[CodeType] = Counter()
        self.moves: Counter[tuple[str, str]] = Counter()

    def begin(self) -> None:
        sys.setprofile(self._heard)

    def end(self) -> None:
        sys.setprofile(None)

    def _heard(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # (a generator or comprehension is part of the function that it stands in)
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name[0] == "<":
            return
        self.functions[code] += 1
        before = frame.f_back
        while before is not None and not before.f_code.co_filename.startswith(PACKAGE):
            before = before.f_back
        came_from = before.f_code.co_filename if before else ""
        if came_from != code.co_filename:
            self.moves[came_from, code.co_filename] += 1

    def files(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for code, count in self.functions.items():
            found[str(Path(code.co_filename).relative_to(PACKAGE))] += count
        return found

    def report(self, name: str, *, every: bool) -> None:
        calls, files = self.functions.total(), self.files()
        print(
            f"{name}: {calls} calls of {len(self.functions)} functions in {len(files)} files, "
            f"{self.moves.total()} moves between files"
        )
        if every:
            for file, count in files.most_common():
                print(f"  {file} {count}")
                for code, times in self.functions.most_common():
                    if code.co_filename == f"{PACKAGE}/{file}":
                        print(f"    {code.co_qualname} {times}")


class Model(LightningModule):
    """Counts one of its steps, or the call of its network in it."""

    def __init__(self, calls: Calls, part: str) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
        self._calls, self._part = calls, part

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == COUNTED and self._part == "step":
            self._calls.begin()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == COUNTED and self._part == "network":
            self._calls.begin()
        outputs: Tensor = self.net(batch[0])
        if self._part == "network":
            self._calls.end()
        return outputs.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._calls.end()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def count(part: str) -> Calls:
    """Train, and count one step (``step``) or the call of the network in it (``network``)."""
    torch.manual_seed(0)
    calls = Calls()
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            pipeline_parallel_size=2, data_parallel_size=1, num_microbatches=2
        ),
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(8 * STEPS, 16)), batch_size=8)
    trainer.fit(Model(calls, part), loader)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="every file and function")
    parser.add_argument("part", choices=["step", "network"], nargs="?", default="step")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    calls = count(arguments.part)
    if calls.functions:  # on the driver alone
        calls.report(arguments.part, every=arguments.list)


if __name__ == "__main__":
    main()
