"""Handing a network over: the bundle and the ONNX file say what the checkpoint says."""

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from datamodules.synth import CohortSpec, generate
from models import ResAttNetClassifier
from models.commands.export import export, metadata, missing_for_onnx, save_onnx
from models.commands.predict_scans import load
from models.errors import UseError
from models.reference import Reference, to_checkpoint
from models.report.checklist import checklist, claim, model_card

PREPARED = {
    "profile": "stripped",
    "spacing_mm": 8.0,
    "spatial_shape": [24, 28, 24],
    "middle_mm": None,
}


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder: ``checkpoints/best.ckpt``, ``bundle`` and ``scans``."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = ResAttNetClassifier(widths=[8, 8, 16, 16], dropout=0.1, recompute=[1])
    torch.nn.init.normal_(model.network.classifier.weight, std=0.3)
    (folder / "checkpoints").mkdir()
    best = folder / "checkpoints" / "best.ckpt"
    torch.save(
        {
            "state_dict": model.state_dict(),
            "hyper_parameters": dict(model.hparams),
            "ADNIDataModule": {"preprocessing": PREPARED},
            "trained_on": ["0123456789abcdef"],
        },
        best,
    )
    like = Reference(
        ("NC", "AD"), {"NC": 1}, {}, (), 2.0, 1, 0.5, torch.zeros(16), torch.eye(16), 1.0
    )
    to_checkpoint(best, like)
    export(best, folder / "bundle")
    generate(folder / "adni", CohortSpec((("NC", 1), ("AD", 1)), 8.0), workers=1)
    (folder / "scans").mkdir()
    found = (p for p in (folder / "adni/ADNI").rglob("*.nii*") if "Mask" not in p.name)
    for number, path in enumerate(sorted(found)):
        path.rename(folder / "scans" / f"{number}{'.nii.gz' if path.suffix == '.gz' else '.nii'}")
    return folder


def expected(run: Path) -> torch.Tensor:
    """(n, 4) probabilities and calibrated ones of the scans, in the order of their names."""
    trained = load(run / "checkpoints" / "best.ckpt")
    images = [trained.prepare(path)[0] for path in sorted((run / "scans").iterdir())]
    with torch.no_grad():
        scores = trained.network(torch.stack(images))
    return torch.cat([scores.softmax(1), (scores / 2.0).softmax(1)], dim=1)


def in_the_bundle(run: Path, *arguments: str) -> str:
    """What Python says in the folder of the bundle, to which this repository is not known."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = str(Path(__file__).parents[2])
    kept = os.pathsep.join(path for path in paths if path and not Path(path).samefile(own))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=run / "bundle",
        env={**os.environ, "PYTHONPATH": kept},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_BY_HAND = """
import json, sys
import torch
from monai.bundle import ConfigParser

parser = ConfigParser()
parser.read_config("configs/inference.json")
parser["dataset_dir"] = sys.argv[1]
steps = parser.get_parsed_content("preprocessing")
network = parser.get_parsed_content("network_def")
network.load_state_dict(torch.load("models/model.pt", weights_only=True))
import datamodules, models
images = [steps(one)["image"] for one in parser.get_parsed_content("dataset::data")]
with torch.no_grad():
    scores = network.eval()(torch.stack(images))
print(json.dumps([scores.softmax(1).tolist(), datamodules.__file__, models.__file__]))
"""


@pytest.mark.conformance
def test_the_bundle_prepares_and_classifies_with_its_own_code_alone(run) -> None:
    said = in_the_bundle(run, "-c", _BY_HAND, str(run / "scans"))
    probabilities, *files = json.loads(said.splitlines()[-1])
    assert torch.tensor(probabilities).allclose(expected(run)[:, :2], atol=1e-6)
    assert all(Path(file).is_relative_to((run / "bundle").resolve()) for file in files)


@needs("fire", "ignite")
def test_the_command_of_monai_executes_the_bundle(run) -> None:
    config = ["--config_file", "configs/inference.json", "--dataset_dir", str(run / "scans")]
    in_the_bundle(run, "-m", "monai.bundle", "run", *config)
    with (run / "bundle/eval/predictions.csv").open(newline="") as file:
        rows = sorted(csv.reader(file))
    said = torch.tensor([[float(value) for value in row[1:]] for row in rows])
    assert said.allclose(expected(run), atol=1e-6)


@needs("onnx", "onnxscript", "onnxruntime")
@pytest.mark.filterwarnings("ignore")  # those of the exporter and of its packages
def test_onnx_says_the_same_for_a_batch_of_any_size(run) -> None:
    import onnxruntime

    trained = load(run / "checkpoints" / "best.ckpt")
    path = save_onnx(trained, run / "any.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = [trained.prepare(scan)[0].numpy() for scan in sorted((run / "scans").iterdir())]
    for batch in (np.stack(images), np.stack(images[:1]), np.stack(images * 3)):
        said = np.concatenate(session.run(None, {"image": batch}), axis=1)
        wanted = expected(run).repeat(3, 1)[: len(batch)].numpy()
        assert np.abs(said - wanted).max() < 1e-4


def test_what_was_trained_with_recomputation_is_handed_over_without(run) -> None:
    record = json.loads((run / "bundle/configs/inference.json").read_text())
    assert record["network_def"]["recompute"] == []
    assert record["preparation"] == PREPARED


def test_the_metadata_names_classes_and_sizes_and_the_card_says_what_is_known(run) -> None:
    outputs = metadata(load(run / "checkpoints" / "best.ckpt"))["network_data_format"]["outputs"]
    assert list(outputs["pred"]["channel_def"].values())[:2] == ["NC", "AD"]
    card = (run / "bundle/docs/README.md").read_text()
    for text in ("24 x 28 x 24 voxels of 8 mm", "1 people", "temperature, 2.00", "Not tested"):
        assert text in card


def test_a_report_has_the_card_and_the_list_filled_from_the_run(run) -> None:
    settings = {"data": {"root": "/x/COHORT", "task": "ad_nc", "leave_out": "site=7"}, "model": {}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    counts = {name: {"scans": n} for n, name in enumerate(("used", "bad", "excluded", "found"))}
    (run / "flow.json").write_text(json.dumps(counts))
    assert "24 x 28 x 24 voxels of 8 mm" in model_card(run)
    shown = checklist(run)
    for text in ("COHORT;", "3 found, 2 excluded", "tested on site=7", "(for the authors)"):
        assert text in shown
    assert "/x/" not in shown
    shown = claim(run)
    for text in ("40 to 42", "(for the authors)", "24 x 28 x 24 voxels of 8 mm", "3 found"):
        assert text in shown


def test_nothing_is_replaced_and_onnx_is_there_where_its_packages_are(run) -> None:
    assert (run / "bundle/models/model.onnx").is_file() is not bool(missing_for_onnx())
    with pytest.raises(UseError, match="is not empty"):
        export(run / "checkpoints" / "best.ckpt", run / "bundle")
