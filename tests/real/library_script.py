"""Runs a training script of `scripts/`: ``python library_script.py FOLDER SCRIPT``.

By the Trainer of one device, or as a rank of two stages. In double precision, which is all that is
not the script's own. Leaves ``one.pt`` or ``rank<N>.pt`` in FOLDER.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


class Notes(pl.Callback):
    """The losses of all steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


def main(folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    script: Any = importlib.import_module(f"scripts.{name}")
    rank, strategy = os.environ.get("LOCAL_RANK"), "auto"
    if rank is not None:
        from lightning_hybrid import HybridGabraStrategy

        strategy = HybridGabraStrategy(
            data_parallel_size=1,
            pipeline_parallel_size=2,
            **getattr(script, "STRATEGY", {"num_microbatches": 2}),
        )
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(7, verbose=False)
    module, notes = script.module().double(), Notes()
    torch.set_default_dtype(torch.float32)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if rank is None else 2,
        strategy=strategy,
        precision="64-true",
        default_root_dir=folder,
        callbacks=[notes],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **script.OPTIONS,
    )
    training, validation = script.loaders()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.fit(module, training, validation)
    found = {
        "losses": notes.losses,
        "before": before,
        "weights": dict(module.state_dict()),
        "metrics": dict(trainer.callback_metrics),
        "stages": 1 if rank is None else trainer.strategy.plan.stages,
    }
    torch.save(found, folder / ("one.pt" if rank is None else f"rank{rank}.pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
