"""How much memory each process needs at most: a network made in `__init__`, in `configure_model`.

24 linear layers of 2048 x 2048 (384 MiB of weights), SGD, 3 steps, two stages on two processes, and
one device for comparison. Counted is the memory that a process has of its own (`RssAnon`, looked at
every 2 ms; Linux), from before the network is made to the end of the fit.

    python benchmarks/process_memory.py
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Event, Thread

import torch
from _timing import bare_trainer
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraStrategy

WIDTH, LAYERS = 2048, 24
CASES = (("__init__", 1), ("__init__", 2), ("configure_model", 2))


class Memory(Thread):
    """Looks at this process all the time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = self.now()
        self._ended = Event()
        self.start()

    @staticmethod
    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def run(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self.now())

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.most - self.before


class Wide(LightningModule):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        if where == "__init__":
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(12, WIDTH)), batch_size=4)


def run(where: str, stages: int, folder: Path) -> None:
    memory = Memory()
    module = Wide(where)
    strategy = HybridGabraStrategy(pipeline_parallel_size=stages) if stages > 1 else "auto"
    trainer = bare_trainer(
        strategy=strategy,
        devices=stages,
        max_epochs=1,
    )
    trainer.fit(module)
    (folder / os.environ.get("LOCAL_RANK", "0")).write_text(str(memory.end()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=2, metavar=("WHERE", "STAGES"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run[0], int(arguments.run[1]), arguments.out)
        return
    for where, stages in CASES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--run", where, str(stages), "--out", folder]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            silent = subprocess.DEVNULL
            subprocess.run(command, env=environment, stdout=silent, stderr=silent, check=True)
            grown = [int(path.read_text()) for path in sorted(Path(folder).iterdir())]
        figures = ", ".join(f"{size / 2**20:.0f}" for size in grown)
        print(f"made in {where}, stages: {stages}: {figures} MiB (driver first)", flush=True)


if __name__ == "__main__":
    main()
