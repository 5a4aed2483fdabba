"""Which stem and layer the demo should explain: accuracy and localisation over several seeds.

Trains each network below on the demo's cohort and settings, on one device, with several seeds (of
weights and order; the split stays), and scores every method and layer over all held-out AD scans,
beside an untrained network. Each run's result is kept in --out; a stopped benchmark goes on.

    python -m datamodules synth demo/adni --subjects 330 --resolution 4
    python benchmarks/demo_localisation.py --root demo/adni
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

from datamodules import ADNIDataModule
from models import ResAttNetClassifier
from models.explain import explain, summarise

NETWORKS: dict[str, dict[str, Any]] = {
    "quarter width, no pooling": {"widths": [16, 32, 64, 128], "stem_pool": False},
    "half width": {"widths": [32, 64, 128, 256]},
    "full width": {},
    "half width, no pooling": {"widths": [32, 64, 128, 256], "stem_pool": False},
}
LAYERS = ("layer1", "layer2", "layer3")


def data(root: Path) -> ADNIDataModule:
    return ADNIDataModule(
        root,
        batch_size=12,
        spatial_shape=(40, 52, 48),
        spacing_mm=4.0,
        val_fraction=0.08,
        test_fraction=0.12,
        augment=False,
        cache_dir=root.parent / "cache",
    )


def measure(root: Path, options: dict[str, Any], seed: int, epochs: int) -> dict[str, Any]:
    """Train and explain once."""
    seed_everything(seed)
    datamodule = data(root)
    model = ResAttNetClassifier(
        optimizer="sgd", learning_rate=0.01, lr_schedule="cosine", **options
    )
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val/loss")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            callbacks=[best],
            logger=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
        )
        started = time.perf_counter()
        trainer.fit(model, datamodule=datamodule)
        spent_s = time.perf_counter() - started
        [metrics] = trainer.test(model, datamodule=datamodule, ckpt_path="best", verbose=False)
    torch.manual_seed(0)
    networks = {"trained": model.network, "untrained": model.make_network()}
    rows = []
    for layer in LAYERS:
        methods = ["gradcam", "gradcam++"] + ["gradient"] * (layer == LAYERS[0])
        truth = root / "truth" / "planted"
        found = explain(networks, datamodule.test_dataloader, methods, layer, 1, truth)
        rows += [row | {"layer": layer} for row in summarise(found.rows)]
    return {"metrics": metrics, "rows": rows, "fit_s": spent_s}


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, runs in found.items():
        accuracies = " ".join(f"{run['metrics']['test/accuracy']:.3f}" for run in runs)
        print(f"\n{name}: test accuracy {accuracies}; energy / chance and peak inside per seed")
        for number, row in enumerate(runs[0]["rows"]):
            lines = [run["rows"][number] for run in runs]
            times = " ".join(f"{line['times_chance']:5.2f}" for line in lines)
            peaks = " ".join(f"{line['peak_in']:.2f}" for line in lines)
            mean = np.mean([line["times_chance"] for line in lines])
            layer = "" if row["method"] == "gradient" else row["layer"]
            head = f"{row['network']:10}{row['method']:11}{layer:8}"
            print(f"  {head}{mean:6.2f} = mean of {times}   {peaks}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("demo/adni"))
    parser.add_argument("--out", type=Path, default=Path("demo/localisation"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen.networks}
    for seed in chosen.seeds:
        for name in chosen.networks:
            path = chosen.out / f"{name.replace(' ', '_')}_{seed}_{chosen.epochs}.json"
            if not path.exists():
                result = measure(chosen.root, NETWORKS[name], seed, chosen.epochs)
                path.write_text(json.dumps(result, indent=1) + "\n")
            results[name].append(json.loads(path.read_text()))
            show({name: results[name]})
