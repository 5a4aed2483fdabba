"""What scripts do to keep what they have trained.

``python saving_script.py FOLDER MODEL PLACE VARIANT``.
Without LOCAL_RANK it is a loop of one process, which leaves ``alone.pt``, and what others load.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from networks_of_transformers import SHARD, batches, network, optimizer_of, save

from lightning_hybrid import HybridGabraStrategy, Sharded
from lightning_hybrid.driver.weights import FilesOfWorkers


def alone(folder: Path, model: str, variant: str) -> None:
    save(model, folder / "base")
    net = network(model, folder / "base", variant)
    optimizer = optimizer_of(net)
    for batch in batches(model):
        optimizer.zero_grad()
        net(**batch).loss.backward()
        optimizer.step()
    if variant == "lora":
        net.save_pretrained(folder / "one_device")
    torch.save(net.state_dict(), folder / "alone.pt")
    if variant == "lora":
        torch.save(net.merge_and_unload().state_dict(), folder / "merged.pt")


class Module(pl.LightningModule):
    """A network of transformers."""

    def __init__(self, folder: Path, model: str, place: str, variant: str) -> None:
        super().__init__()
        self.made = partial(network, model, folder / "base", variant)
        self.net: Any = self.made() if place == "__init__" else None
        self.in_the_run = folder / "in_the_run.pt" if variant == "lora" else None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.made()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)

    def on_train_end(self) -> None:
        """Keep the adapters, and note which tensors have come from another rank for it."""
        came, give = list[str](), FilesOfWorkers._give

        def noted(files: Any, rank: int, address: Any) -> torch.Tensor:
            came.append(address.name)
            return give(files, rank, address)

        if self.in_the_run:
            with patch.object(FilesOfWorkers, "_give", noted):
                torch.save((adapters(self.trainer, self.net), came), self.in_the_run)


def adapters(trainer: pl.Trainer, net: Any) -> dict[str, torch.Tensor]:
    """Those of PEFT, on rank 0."""
    from peft import get_peft_model_state_dict

    state = trainer.strategy.full_state_dict(ignore_frozen_params=True)
    state = {name.removeprefix("net."): value for name, value in state.items()}
    return get_peft_model_state_dict(net, state_dict=state) if state else {}


def keep_adapters(trainer: pl.Trainer, module: Module, folder: Path) -> None:
    """By themselves, and merged into the network."""
    found = adapters(trainer, module.net)
    torch.save(found, folder / "after_the_run.pt")
    module.net.save_pretrained(folder / "saved", state_dict=found)
    module.net.merge_and_unload().save_pretrained(folder / "merged", max_shard_size=SHARD)


def keep_all(trainer: pl.Trainer, module: Module, folder: Path, place: str) -> None:
    """As `save_pretrained` does it, and where no rank is whole as a sharded checkpoint too."""
    options: dict[str, Any] = {"max_shard_size": SHARD}
    if place == "configure_model":
        trainer.save_checkpoint(folder / "last.ckpt")
        state = trainer.strategy.full_state_dict()
        options["state_dict"] = {n.removeprefix("net."): value for n, value in state.items()}
    if trainer.is_global_zero:
        module.net.save_pretrained(folder / "saved", **options)


def in_stages(folder: Path, model: str, place: str, variant: str) -> None:
    strategy = HybridGabraStrategy(
        data_parallel_size=1, pipeline_parallel_size=2, num_microbatches=2, checkpoint=Sharded()
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(folder, model, place, variant)
    trainer.fit(module, torch.utils.data.DataLoader(list(batches(model)), batch_size=None))
    if variant == "lora":
        keep_adapters(trainer, module, folder)
    else:
        keep_all(trainer, module, folder, place)


def main(folder: Path, model: str, place: str, variant: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if "LOCAL_RANK" in os.environ:
        in_stages(folder, model, place, variant)
    else:
        alone(folder, model, variant)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
