"""Results of a run as files that are never replaced by those of other settings."""

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import UseError

if TYPE_CHECKING:
    from models.predictions import Prediction


def run_folder(ckpt_path: str | Path) -> Path:
    """The folder of the run that a checkpoint belongs to; a folder of several runs is itself."""
    if Path(ckpt_path).is_dir():
        return Path(ckpt_path)
    folder = Path(ckpt_path).parent
    return folder.parent if folder.name == "checkpoints" else folder


def writable(folder: Path) -> Path:
    """Make a folder if need be, and try it.

    Raises:
        UseError: If nothing can be written there; better now than after the work.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UseError(
            f"Results cannot be written to {folder}: {error.strerror or error}. Give another "
            "folder, or make room and rights there."
        ) from error


def scans_hash(predictions: "Sequence[Prediction]") -> str:
    """Which scans, with which labels, a result is from; without identifiers."""
    names = sorted(f"{row.image_id}|{row.label}" for row in predictions)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def free_path(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Where a result goes: ``name``, or ``name_2`` and so on if that is one of other settings.

    Args:
        folder: Of the run.
        name: Of a JSON file, without its ending; a table of that name beside it counts with it.
        settings: What the result depends on, beside the run itself.
    """
    number = 1
    while True:
        path = folder / (f"{name}.json" if number == 1 else f"{name}_{number}.json")
        there = path.exists() or path.with_suffix(".tsv").exists()
        if not there or load_settings(path) == json.loads(json.dumps(settings)):
            return path
        number += 1


def beside(metrics: Path, name: str, ending: str) -> Path:
    """The file of another kind with the number of a file of metrics."""
    return metrics.with_name(metrics.stem.replace("metrics", name) + ending)


def save_result(path: Path, metrics: Mapping[str, float], settings: Mapping[str, Any]) -> None:
    """Write metrics with the settings they depend on; what is undefined becomes null."""
    known = {k: None if math.isnan(v) else v for k, v in metrics.items()}
    path.write_text(json.dumps({"settings": settings, "metrics": known}, indent=2) + "\n")


def load_metrics(path: Path) -> dict[str, float]:
    """The defined metrics of a file of `save_result`."""
    metrics = json.loads(path.read_text())["metrics"]
    return {name: value for name, value in metrics.items() if value is not None}


def load_settings(path: Path) -> dict[str, Any] | None:
    """The settings in a file of `save_result`; None if it is none, or not there."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found
