"""How much memory each rank needs at most, phase by phase, where a model is large.

Three steps with Adam, a checkpoint in the middle of the fit, the end of the fit. Counted is the
most that a process has in memory (`VmHWM`, which is set back between phases; Linux), without what
it had before the model was made.

    python benchmarks/large_models.py --width 4096 --layers 24
    python benchmarks/large_models.py --peers "one device;hybrid 2 __init__" --limit-mib 3000
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _timing import bare_trainer
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridGabraStrategy

PEERS = (
    "one device",
    "ddp 2",
    "hybrid 2 __init__",
    "hybrid 2 configure_model",
    "hybrid 4 configure_model",
)
MIB = 2**20


def memory(field: str) -> int:
    """A line of `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Phases:
    """The peaks of this process."""

    def __init__(self) -> None:
        self.base = memory("VmRSS")
        self.peaks: dict[str, float] = {}
        self.times: dict[str, float] = {}
        self._begun = time.perf_counter()
        self._reset()

    def over(self, phase: str) -> None:
        """A phase is over; the next one begins."""
        peak = (memory("VmHWM") - self.base) / MIB
        self.peaks[phase] = max(self.peaks.get(phase, 0.0), round(peak))
        now = time.perf_counter()
        self.times[phase] = round(now - self._begun, 2)
        self._begun = now
        self._reset()

    @staticmethod
    def _reset() -> None:
        Path("/proc/self/clear_refs").write_text("5")


class Perceptron(LightningModule):
    """Layers of one width."""

    def __init__(self, where: str, width: int, layers: int) -> None:
        super().__init__()
        self._width, self._layers = width, layers
        self.net: nn.Module | None = None
        self.losses: list[float] = []
        if where == "__init__":
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            parts = [
                part
                for _ in range(self._layers)
                for part in (nn.Linear(self._width, self._width), nn.ReLU())
            ]
            self.net = nn.Sequential(*parts)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        loss: Tensor = (self.net(batch) - 1).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(torch.randn(12, self._width, generator=generator), batch_size=4)  # type: ignore[arg-type]


class Saves(Callback):
    """Looks at the phases of the driver, and saves in the second step."""

    def __init__(self, phases: Phases, folder: Path) -> None:
        self._phases, self._folder = phases, folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self._phases.over("steps")
            trainer.save_checkpoint(self._folder / "saved.ckpt")
            self._phases.over("checkpoint")

    def on_train_end(self, *_: Any) -> None:
        self._phases.over("steps")


def run(peer: str, width: int, layers: int, folder: Path, limit_mib: int) -> None:
    """One rank."""
    phases = Phases()
    if limit_mib:
        limit = memory("VmSize") + limit_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    kind, count, where = [*peer.split(), "1", "__init__"][:3]
    if peer == "one device":
        kind, count, where = "auto", "1", "__init__"
    strategy: Any = kind
    if kind == "hybrid":
        strategy = HybridGabraStrategy(
            pipeline_parallel_size=int(count), num_microbatches=2, verify=False
        )
    module = Perceptron(where, width, layers)
    saves = Saves(phases, folder)
    trainer = bare_trainer(
        strategy=strategy, devices=int(count), max_epochs=1, callbacks=[saves],
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module)
    phases.over("end" if module.losses else "all")  # workers have no hooks
    rank = os.environ.get("LOCAL_RANK", "0")
    result = {"peaks": phases.peaks, "times": phases.times, "losses": module.losses}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--peers", default=";".join(PEERS))
    parser.add_argument("--limit-mib", type=int, default=0, help="of each rank (RLIMIT_AS)")
    parser.add_argument("--run")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = arguments.width, arguments.layers
    if arguments.run:
        run(arguments.run, *sizes, arguments.out, arguments.limit_mib)
        return
    weights = sizes[0] * (sizes[0] + 1) * sizes[1] * 4 / MIB
    print(f"{weights:.0f} MiB of weights; peaks in MiB, by rank")
    for peer in arguments.peers.split(";"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            command = [sys.executable, __file__, "--run", peer, "--out", place]
            command += ["--width", f"{sizes[0]}", "--layers", f"{sizes[1]}"]
            command += ["--limit-mib", f"{arguments.limit_mib}"]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            found = sorted(folder.glob("rank*.json"))
            if done.returncode or not found:
                print(f"{peer}: failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
                continue
            for path in found:
                seen = json.loads(path.read_text())
                losses = " ".join(f"{loss:.7f}" for loss in seen["losses"])
                print(
                    f"{peer}, {path.stem}: {seen['peaks']} s: {seen['times']} {losses}", flush=True
                )


if __name__ == "__main__":
    main()
