"""A user's script that goes on when a replica is lost: ``python ... FOLDER``.

FOLDER holds ``config.json``. Each driver writes there what it trains on, to ``seen.<N>``; each that
is left leaves its weights and validations, as ``rank<N>.pt``.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from balance_script import data, network
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid.process import Children


class Module(LightningModule):
    def __init__(self, seen: Path) -> None:
        super().__init__()
        self.seen = seen
        self.validated = list[tuple[int, list[int]]]()
        self.net = network()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y, numbers = batch
        loss = nn.functional.cross_entropy(self.scale * self.net(x), y)
        with self.seen.open("a") as file:  # at once, since this process may be killed
            print(json.dumps([self.trainer.global_step, numbers.tolist(), loss.item()]), file=file)
        self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y, numbers = batch
        self.validated.append((self.trainer.global_step, numbers.tolist()))
        loss = nn.functional.cross_entropy(self.scale * self.net(x), y)
        self.log("validation", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Kill(Callback):
    """Kills processes: ``{"rank": whom, "by": rank, "step": ..., "where": hook}``, or raises."""

    def __init__(self, kills: list[dict[str, Any]], folder: Path, rank: int) -> None:
        for kill in kills:
            setattr(self, kill["where"], self._hook)
        self.kills, self.folder, self.rank = kills, folder, rank

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Servers of workers run nothing that could leave word of them."""
        for rank, child in enumerate(Children.processes, 1):
            (self.folder / f"pid.{rank}").write_text(str(child.pid))

    def _hook(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        for kill in self.kills:
            if kill["step"] != trainer.global_step or kill["by"] != self.rank:
                continue
            if kill["rank"] is None:
                raise ValueError("this error is on purpose")
            os.kill(int((self.folder / f"pid.{kill['rank']}").read_text()), signal.SIGKILL)


def main(folder: Path) -> None:
    from lightning_hybrid import BySpeed, HybridGabraStrategy, Search

    config = json.loads((folder / "config.json").read_text())
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    seed_everything(5, verbose=False)
    module = Module(folder / f"seen.{rank}")
    replicas, stages = config["replicas"], config["stages"]
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            data_parallel_size=replicas,
            pipeline_parallel_size=stages,
            num_microbatches=1 if stages == 1 else 2,
            replicas=BySpeed(on_loss=config.get("on_loss", "continue")),
            search=Search(capacity=config["speeds"]),
        ),
        accelerator="cpu",
        devices=replicas * stages,
        default_root_dir=folder,
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", "{epoch}", save_top_k=-1),
            Kill(config["kills"], folder, rank),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=2,
        use_distributed_sampler=True,
        **config.get("trainer", {}),
    )
    whole = data(config["samples"])
    apart: dict[str, Any] = (
        {"num_workers": 1, "multiprocessing_context": "fork"} if config.get("apart") else {}
    )
    loaders = (
        DataLoader(whole, config["batch"], shuffle=True, **apart),
        DataLoader(data(12), 2),
    )
    trainer.fit(module, *loaders)
    seen = {
        "validated": module.validated,
        "weights": dict(module.state_dict()),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "world": (trainer.global_rank, trainer.world_size),
    }
    torch.save(seen, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
