import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from datamodules.synth import CohortSpec, generate
from models import ResAttNetClassifier
from models.draw_explanations import DrawExplanations
from models.explain import explain
from models.explanation import Writer
from models.tables import read_table

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
]


def scans() -> DataLoader:
    noise = torch.Generator().manual_seed(0)
    affine = torch.diag(torch.tensor([8.0, 8, 8, 1]))
    items = [
        {
            "image": torch.randn(1, 16, 16, 16, generator=noise),
            "label": i % 2,
            "affine": affine,
            "subject": f"999_S_{i:04d}",
            "image_id": f"I{9_000_000 + i}",
        }
        for i in range(4)
    ]
    return DataLoader(items, batch_size=2)


def trained(path: Path, *callbacks: DrawExplanations) -> ResAttNetClassifier:
    seed_everything(1, verbose=False)
    model = ResAttNetClassifier(widths=[8, 8, 8, 8], stem_pool=False, dropout=0.3)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(model, scans(), scans())
    return model


@pytest.mark.conformance
def test_draws_at_the_end_of_epochs_and_training_stays_the_same(tmp_path) -> None:
    watched = trained(tmp_path, DrawExplanations(every_n_epochs=1, layer="layer1"))
    for epoch in (1, 2):
        folder = tmp_path / "explain" / f"epoch_{epoch}"
        assert len(list(folder.glob("999_S_*_gradcam_layer1.png"))) == 2
    # what was drawn last is the explanation of the weights that came out
    methods = ["gradcam", "hirescam"]
    found = explain({"trained": watched.network}, scans, methods, "layer1", 2)
    Writer(tmp_path / "again", watched.class_names, "layer1", {}).write(found)
    assert read_table(tmp_path / "again" / "explain.tsv") == read_table(folder / "explain.tsv")
    for path in (tmp_path / "again").glob("*.png"):
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
    plain = trained(tmp_path / "plain")
    for (name, a), b in zip(plain.state_dict().items(), watched.state_dict().values()):
        assert torch.equal(a, b), name


@pytest.mark.conformance
@pytest.mark.distributed
def test_draws_while_the_layers_lie_on_two_devices(tmp_path) -> None:
    spec = CohortSpec(subjects=(("AD", 6), ("NC", 6)), resolution_mm=8.0)
    generate(str(tmp_path / "adni"), spec, workers=1)
    demo = Path(__file__).parents[2] / "configs" / "demo.yaml"
    settings = yaml.safe_load(demo.read_text())
    settings["trainer"] |= {"max_epochs": 1, "enable_progress_bar": False}
    for logger in settings["trainer"]["logger"]:
        logger["init_args"]["save_dir"] = str(tmp_path)
    drawing = {"class_path": "models.draw_explanations.DrawExplanations"}
    settings["trainer"]["callbacks"].append(drawing | {"init_args": {"every_n_epochs": 1}})
    settings["model"] |= {"widths": [8, 8, 16, 16]}
    settings["data"] |= {"root": str(tmp_path / "adni"), "cache_dir": str(tmp_path / "cache")}
    settings["data"] |= {"spacing_mm": 8.0, "spatial_shape": [24, 32, 24]}
    settings["data"] |= {"val_fraction": 0.3, "test_fraction": 0.3}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        [sys.executable, "-m", "models", "fit", "--config", str(tmp_path / "config.yaml")],
        cwd=demo.parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "version_0" / "explain" / "epoch_1"
    assert len(list(folder.glob("999_S_*_gradcam_layer1.png"))) == 2
