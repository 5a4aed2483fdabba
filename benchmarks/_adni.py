"""What the studies on the synthetic cohort share: the cohort, one training run, its maps."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from datamodules import ADNIDataModule
from models import ResAttNetClassifier
from models.explain import explain, summarise
from models.findings import MethodName


def cohort(root: Path, **options: Any) -> ADNIDataModule:
    """The demo's data settings for a cohort of 4 mm; the split does not depend on the run."""
    defaults = {"batch_size": 12, "val_fraction": 0.08, "test_fraction": 0.12, "augment": False}
    defaults |= {"spatial_shape": (40, 52, 48), "spacing_mm": 4.0}
    return ADNIDataModule(root, cache_dir=root.parent / "cache", **(defaults | options))


def trained(
    make: Callable[[], ResAttNetClassifier],
    data: ADNIDataModule,
    seed: int,
    epochs: int,
    callbacks: Sequence[Callback] = (),
) -> tuple[ResAttNetClassifier, dict[str, Any]]:
    """Make a model and train it on one device.

    Returns:
        The model with the weights of its best epoch (by validation loss), and what came of it:
        ``metrics`` of the test, ``fit_s`` the time of the training.
    """
    seed_everything(seed, verbose=False)
    model = make()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            devices=1,
            max_epochs=epochs,
            callbacks=[*callbacks, ModelCheckpoint(folder, monitor="val/loss")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        started = time.perf_counter()
        trainer.fit(model, datamodule=data)
        spent_s = time.perf_counter() - started
        [metrics] = trainer.test(model, datamodule=data, ckpt_path="best", verbose=False)
    return model, {"metrics": metrics, "fit_s": spent_s}


def explained(
    networks: Mapping[str, nn.Module],
    data: ADNIDataModule,
    layers: Sequence[str],
    methods: Sequence[MethodName] = ("gradcam", "gradcam++", "hirescam"),
) -> list[dict[str, Any]]:
    """Localisation of each network, method and layer, over all held-out scans of AD.

    The input gradient has no layer, and is taken once.
    """
    data.prepare_data()
    data.setup("test")
    truth = data.root / "truth" / "planted"
    rows: list[dict[str, Any]] = []
    for number, layer in enumerate(layers):
        chosen: list[MethodName] = [*methods, "gradient"] if number == 0 else [*methods]
        found = explain(networks, data.test_dataloader, chosen, layer, 1, truth)
        rows += summarise(found.rows)
    return rows


def untrained(model: ResAttNetClassifier) -> nn.Module:
    """A network of the same form that has seen nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model.make_network()
