"""Train a network of which a rank has no room for all: what each rank sees, for a test.

python limited_memory_script.py FOLDER, with config.json there: strategy, stages, where the network
is built, the limit on the address space of each rank (MiB beyond what Python and its modules take),
and the checkpoint to go on from.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridGabraStrategy

WIDTH, LAYERS, STEPS = 2048, 24, 4
"""384 MiB of weights, and as much again for gradients, and twice for the states of Adam."""
MIB = 2**20


class Model(LightningModule):
    """Layers of one width."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        self.losses: list[float] = []
        if where == "__init__":
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
            self.net = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        assert self.net is not None
        loss: Tensor = (self.net(batch) - 1).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(torch.randn(4, WIDTH, generator=generator), batch_size=2)  # type: ignore[arg-type]


class Saves(Callback):
    """In the middle of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == STEPS // 2:
            trainer.save_checkpoint(self._path)


def numbers_after(module: Model, trainer: Trainer) -> dict[str, float]:
    """Of each weight, gradient and state that a script reads one after the other."""
    [optimizer] = trainer.optimizers
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = parameter.detach().double().norm().item()
        if trainer.is_global_zero:
            assert parameter.grad is not None
            found[f"{name}.grad"] = parameter.grad.double().norm().item()
            for key, value in optimizer.state[parameter].items():
                found[f"{name}.{key}"] = value.double().norm().item()
    return found


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if config["limit_mib"]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + config["limit_mib"] * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    stages, where = config["stages"], config["where"]
    strategy: Any = "auto"
    if stages > 1:
        strategy = HybridGabraStrategy(pipeline_parallel_size=stages, num_microbatches=2)
    module = Model(where)
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, devices=stages, max_steps=STEPS, logger=False,
        callbacks=[Saves(folder / "saved.ckpt")] if config["saves"] else [],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=config["resumes"])
    after = numbers_after(module, trainer) if where == "__init__" else {}
    rank = os.environ.get("LOCAL_RANK", "0")
    torch.save({"losses": module.losses, "after": after}, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
