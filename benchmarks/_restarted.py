"""A user's script that may be started again, by torchrun or by hand: ``... FOLDER OPTIONS``.

It goes on from the last checkpoint in FOLDER, with as many processes as there are then. OPTIONS are
those of the strategy, as JSON, and maybe the name of a `record`; ``null`` is plain Lightning on one
device. What it has seen lies in FOLDER at the end, and on the way a file for each thing that this
start has come to.
"""

# ruff: noqa: E402  a kill shall meet imports, too, so this is behind the first mark

import json
import os
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
START, RANK = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("RANK", "0")
PROCESSES = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
HOSTS = int(os.environ.get("GROUP_WORLD_SIZE", 1))


def mark(phase: str) -> None:
    """This start has come so far."""
    (FOLDER / f"{phase}.{START}").touch()


(FOLDER / f"started.{START}.{RANK} of {PROCESSES * HOSTS}").write_text(str(os.getpid()))

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hybrid import BySpeed, Equal, HybridGabraStrategy, Sharded

EPOCHS, SAMPLES, BATCH, EVERY = 8, 40, 8, 3


class Resumable(DataLoader[Any]):
    """Goes on behind the batches that were trained with when a checkpoint was written.

    Lightning goes on with the number of the batch, and with a plain loader's first one.
    """

    done = skip = 0

    def __iter__(self) -> Any:
        skip, self.skip = self.skip, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self.done = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["done"]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))]
        self.net = nn.Sequential(*layers, nn.Linear(8, 4)).double()
        x = torch.randn(SAMPLES, 8, dtype=torch.float64)
        self.data = TensorDataset(x, torch.randint(0, 4, (SAMPLES,)))

    def train_dataloader(self) -> DataLoader[Any]:
        # so many samples in all, however many replicas there are, and in the order that Lightning
        # makes for several: it gives each of them such a sampler
        replicas, seed = self.trainer.world_size, int(os.environ["PL_GLOBAL_SEED"])
        sampler: Any = DistributedSampler(self.data, 1, 0, seed=seed) if replicas == 1 else None
        return Resumable(self.data, BATCH // replicas, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, BATCH // self.trainer.world_size)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.05)  # so that what is killed is a step more often
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if not self.trainer.sanity_checking:
            self.note(f"epoch {self.current_epoch}, batch {batch_idx}", loss)

    def note(self, name: str, loss: Tensor) -> None:
        """Write down the mean over the replicas."""
        losses: Any = self.all_gather(loss)
        mean = losses.mean().item()
        if self.trainer.is_global_zero:
            with (FOLDER / "losses.txt").open("a") as file:
                file.write(f"{name}: {mean!r}\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Marks(Callback):
    saved = 0

    def on_train_start(self, *_: Any) -> None:
        mark("training")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        # before the checkpoint of this step, and not where sizes are chosen by a step of a copy
        assert isinstance(pl_module, Module)
        pl_module.note(f"step {trainer.global_step}", outputs["loss"])

    def on_save_checkpoint(self, *_: Any) -> None:
        self.saved += 1
        mark(f"saving {self.saved}")

    def on_train_end(self, *_: Any) -> None:
        mark("ending")


RECORDS: dict[str, dict[str, Any]] = {
    "": {},
    "sharded": {"checkpoint": Sharded()},
    "by speed": {"replicas": BySpeed()},
    "divided": {"replicas": Equal(shard_states=True)},
}


def strategy_of(options: dict[str, Any]) -> HybridGabraStrategy:
    sizes = dict(options)
    return HybridGabraStrategy(**RECORDS[sizes.pop("record", "")], **sizes)


def main(options: dict[str, Any] | None) -> None:
    seed_everything(5, verbose=False)
    saving = ModelCheckpoint(FOLDER / "checkpoints", save_last=True, every_n_train_steps=EVERY)
    trainer = Trainer(
        strategy="auto" if options is None else strategy_of(options),
        accelerator="cpu",
        devices=PROCESSES,
        num_nodes=HOSTS,
        max_epochs=EPOCHS,
        default_root_dir=FOLDER,
        callbacks=[saving, Marks()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, ckpt_path="last")  # the first start finds none, of which Lightning warns
    if trainer.is_global_zero:
        torch.save(module.state_dict(), FOLDER / "weights.pt")


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
