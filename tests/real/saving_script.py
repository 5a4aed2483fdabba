"""What scripts do to keep what they have trained.

``python saving_script.py FOLDER MODEL PLACE VARIANT``.
Without LOCAL_RANK it is a loop of one process, which leaves ``alone.pt``, and what others load.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from networks_of_transformers import SHARD, batches, network, optimizer_of, save


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


def in_stages(folder: Path, model: str, place: str, variant: str) -> None:
    import lightning.pytorch as pl

    from lightning_hybrid import HybridGabraStrategy
    from lightning_hybrid.state import deferred_weights

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None
            if place == "__init__":
                self.net = network(model, folder / "base", variant)

        def configure_model(self) -> None:
            if self.net is None:
                self.net = network(model, folder / "base", variant)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net)

        def on_train_end(self) -> None:
            if variant == "lora":
                torch.save(adapters(self.trainer, self.net), folder / "in_the_run.pt")

    def adapters(trainer: Any, net: Any) -> Any:
        from peft import get_peft_model_state_dict

        state = trainer.strategy.full_state_dict(ignore_frozen_params=True)
        state = {name.removeprefix("net."): value for name, value in state.items()}
        return get_peft_model_state_dict(net, state_dict=state) if state else {}

    strategy = HybridGabraStrategy(
        data_parallel_size=1, pipeline_parallel_size=2, num_microbatches=2, checkpoint="sharded"
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
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(list(batches(model)), batch_size=None))
    if variant == "lora":
        came: list[str] = []
        hear = deferred_weights._hear_workers

        def noted(mesh: Any) -> Any:
            for named in hear(mesh):
                came.extend(named)
                yield named

        with patch.object(deferred_weights, "_hear_workers", noted):
            found = adapters(trainer, module.net)
        if trainer.is_global_zero:
            torch.save((found, came), folder / "after_the_run.pt")
            module.net.save_pretrained(folder / "saved", state_dict=found)
        return
    if place == "__init__":
        if trainer.is_global_zero:
            module.net.save_pretrained(folder / "saved", max_shard_size=SHARD)
        return
    trainer.save_checkpoint(folder / "last.ckpt")
    state = strategy.full_state_dict()
    if trainer.is_global_zero:
        state = {name.removeprefix("net."): value for name, value in state.items()}
        module.net.save_pretrained(folder / "saved", state_dict=state, max_shard_size=SHARD)


def main(folder: Path, model: str, place: str, variant: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if "LOCAL_RANK" in os.environ:
        in_stages(folder, model, place, variant)
    else:
        alone(folder, model, variant)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
