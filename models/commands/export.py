"""``python -m models export --ckpt_path BEST --out FOLDER``: a MONAI bundle, and ONNX in it.

The bundle has all it needs: weights, configuration, and the code of this preparation and network,
so that whoever gets it runs ``python -m monai.bundle run`` in its folder without this repository.
"""

import argparse
import ast
import json
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import datamodules
import models
from models.card import as_markdown, card
from models.commands.predict_scans import Trained, load
from models.errors import UseError
from models.results import run_folder, writable

NEEDED_FOR_ONNX = ("onnx", "onnxscript")
_OPSET = 18
_LICENCE = Path(__file__).parents[2] / "LICENSE"


class Probabilities(nn.Module):
    """Images (B, 1, D, H, W) to the network's probabilities (B, K) and the calibrated ones (B, K).

    Args:
        network: to scores.
        temperature: that scores are divided by for the calibrated ones; 1: not known.
    """

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network = network
        self.temperature = temperature

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.network(image)
        return scores.softmax(dim=1), (scores / self.temperature).softmax(dim=1)


def export(ckpt_path: Path, out: Path) -> list[Path]:
    """Write the bundle; ``models/model.onnx`` only where the packages for it are installed.

    Args:
        ckpt_path: checkpoint of ``python -m models fit``.
        out: folder that is not there yet, or is empty.

    Returns:
        The files that whoever gets the bundle looks at first.

    Raises:
        UseError: there is something in ``out``, or the checkpoint does not know its preparation.
    """
    if out.exists() and any(out.iterdir()):
        raise UseError(f"{out} is not empty; give --out a new folder, nothing is replaced.")
    trained = load(ckpt_path)
    if trained.scale is not None:
        raise UseError(
            f"{ckpt_path} tells a number, {trained.class_names[0]}; bundles are made of networks "
            "that tell classes. Give the checkpoint itself, for `models predict --ckpt_path`."
        )
    for name in ("configs", "models", "docs", "scripts"):
        writable(out / name)
    _copy_code(out / "scripts")
    torch.save(trained.network.state_dict(), out / "models" / "model.pt")
    texts = {
        "configs/metadata.json": _json(metadata(trained)),
        "configs/inference.json": _json(inference(trained)),
        "docs/README.md": as_markdown(_title(trained), card(ckpt_path)) + _USE,
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    written = [out / name for name in (*texts, "models/model.pt")]
    if not missing_for_onnx():
        written.append(save_onnx(trained, out / "models" / "model.onnx"))
    return written


def missing_for_onnx() -> list[str]:
    """Names of packages that an export to ONNX needs and that are not installed."""
    return [name for name in NEEDED_FOR_ONNX if find_spec(name) is None]


def save_onnx(trained: Trained, path: Path) -> Path:
    """Write network, softmax and calibration as one ONNX file, for batches of any size."""
    example = torch.zeros(2, 1, *trained.preprocessing["spatial_shape"])
    program = torch.onnx.export(
        Probabilities(trained.network, _temperature(trained)).eval(),
        (example,),
        input_names=["image"],
        output_names=["probabilities", "calibrated"],
        dynamic_shapes={"image": {0: torch.export.Dim("batch")}},
        opset_version=_OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    assert program is not None
    program.save(str(path), external_data=False)
    return path


def inference(trained: Trained) -> dict[str, Any]:
    """The configuration that ``python -m monai.bundle run`` executes."""
    own = trained.preprocessing
    return {
        "imports": [
            "$from pathlib import Path",
            "$import scripts",  # from then on Python finds the code that lies there
            "$from datamodules.transforms import fixed_transforms",
        ],
        "bundle_root": ".",
        "dataset_dir": "scans",
        "output_dir": "eval",
        "scans": "$sorted(map(str, Path(@dataset_dir).glob('**/*.nii*')))",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "temperature": _temperature(trained),
        "network_def": {"_target_": "models.resattnet.ResAttNet3D", **_options(trained)},
        "network": "$@network_def.to(@device)",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": "$fixed_transforms(**@preparation)",
        },
        "preparation": {
            "spatial_shape": list(own["spatial_shape"]),
            "spacing_mm": own["spacing_mm"],
            "profile": own["profile"],
            "middle_mm": own.get("middle_mm"),
        },
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': path, 'scan': path} for path in @scans]",
            "transform": "@preprocessing",
        },
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@dataset",
            "batch_size": 1,
            "num_workers": 0,
        },
        "inferer": {"_target_": "SimpleInferer"},
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {
                    "_target_": "Lambdad",
                    "keys": "pred",
                    "func": "$lambda scores: torch.cat([scores.softmax(-1), "
                    "(scores / @temperature).softmax(-1)])",
                }
            ],
        },
        "handlers": [
            {
                "_target_": "CheckpointLoader",
                "load_path": "$@bundle_root + '/models/model.pt'",
                "load_dict": {"model": "@network"},
                "map_location": "@device",
            },
            {
                "_target_": "ClassificationSaver",
                "output_dir": "@output_dir",
                "filename": "predictions.csv",
                "batch_transform": "$lambda batch: [{'filename_or_obj': one['scan']} "
                "for one in batch]",
                "output_transform": "$monai.handlers.from_engine(['pred'])",
            },
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
        "initialize": ["$monai.utils.set_determinism(seed=0)"],
        "run": ["$@evaluator.run()"],
    }


def metadata(trained: Trained) -> dict[str, Any]:
    """``metadata.json`` in MONAI's form."""
    own, names = trained.preprocessing, trained.class_names
    image = {
        "type": "image",
        "format": "magnitude",
        "modality": "MR",
        "num_channels": 1,
        "spatial_shape": list(own["spatial_shape"]),
        "dtype": "float32",
        "value_range": [-3, 3],
        "is_patch_data": False,
        "channel_def": {"0": f"T1-weighted, {own['profile']}, {own['spacing_mm']:g} mm, RAS"},
    }
    numbers = {
        "type": "probabilities",
        "format": "classification",
        "num_channels": 2 * len(names),
        "spatial_shape": [],
        "dtype": "float32",
        "value_range": [0, 1],
        "is_patch_data": False,
        "channel_def": {
            str(k): text
            for k, text in enumerate([*names, *(f"{name}, calibrated" for name in names)])
        },
    }
    return {
        "schema": _SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": "as exported"},
        "monai_version": version("monai"),
        "pytorch_version": str(torch.__version__),
        "numpy_version": version("numpy"),
        "required_packages_version": {name: version(name) for name in ("nibabel", "scipy")},
        "name": _title(trained),
        "task": "classification of structural MRI of the brain",
        "description": "A network trained for research. What it says is no diagnosis.",
        "intended_use": "research only; scans prepared as its training scans were",
        "copyright": "see LICENSE; the data it was trained on has terms of its own",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": numbers}},
    }


_SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
    "meta_schema_20240725.json"
)
_USE = """
## Use

In this folder, with MONAI, nibabel, SciPy, `fire` and `pytorch-ignite`:

    python -m monai.bundle run --config_file configs/inference.json --dataset_dir SCANS

writes `eval/predictions.csv`: for each NIfTI file below SCANS its path, the probabilities of the
classes, and the calibrated ones. `models/model.onnx`, if it is there, takes images that were
prepared in the same way (`preprocessing` in `configs/inference.json`). Neither checks a scan or
says what lies outside of the training range: `python -m models predict --scans` of the repository
does both.
"""


def _options(trained: Trained) -> Mapping[str, Any]:
    options = {**trained.options, "recompute": []}
    return {name: list(v) if isinstance(v, list | tuple) else v for name, v in options.items()}


def _temperature(trained: Trained) -> float:
    return trained.reference.temperature if trained.reference is not None else 1.0


def _title(trained: Trained) -> str:
    *others, last = trained.class_names
    return f"3D-ResAttNet, {last} against {', '.join(others)}"


def _copy_code(scripts: Path) -> None:
    """What the preparation and the network are made of, and nothing else of the two packages."""
    for package, first in ((datamodules, "transforms"), (models, "resattnet")):
        source = Path(str(package.__file__)).parent
        target = writable(scripts / source.name)
        (target / "__init__.py").touch()
        for path in _with_imports(source, first):
            shutil.copyfile(path, target / path.name)
    (scripts / "__init__.py").write_text(_INIT)
    if _LICENCE.is_file():
        shutil.copyfile(_LICENCE, scripts.parent / "LICENSE")


_INIT = """\"\"\"Importing this lets Python find the packages beside it.\"\"\"

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
"""


def _with_imports(folder: Path, first: str) -> list[Path]:
    """The file of a module of a package, and those of the same package that it imports."""
    found: dict[str, Path] = {}
    left = [first]
    while left:
        name = left.pop()
        path = folder / f"{name}.py"
        if name in found or not path.is_file():
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = node.module.removeprefix(f"{folder.name}.")
                if node.level or inner != node.module:
                    left.append(inner.partition(".")[0])
    return list(found.values())


def _json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m models export",
        description="Write a checkpoint as a MONAI bundle, and as ONNX where onnx and onnxscript "
        "are installed.",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", required=True, type=Path, help="RUN/checkpoints/best.ckpt")
    parser.add_argument("--out", type=Path, help="folder of the bundle (default: RUN/bundle)")
    options = parser.parse_args(arguments)
    for path in export(options.ckpt_path, options.out or run_folder(options.ckpt_path) / "bundle"):
        print(path)
    missing = missing_for_onnx()
    if missing:
        print(f"no ONNX: {', '.join(missing)} not installed (pip install '.[handover]')")
