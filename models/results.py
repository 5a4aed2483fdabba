"""Results of a run as files that are never replaced by those of other settings."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.predictions import Prediction


def scans_hash(predictions: Sequence[Prediction]) -> str:
    """Which scans, with which labels, a result is from; without identifiers."""
    names = sorted(f"{row.image_id}|{row.label}" for row in predictions)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def free_path(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Where a result goes: ``name``, or ``name_2`` and so on if that is one of other settings.

    Args:
        folder: Of the run.
        name: Of a JSON file, without its ending.
        settings: What the result depends on, beside the run itself.
    """
    number = 1
    while True:
        path = folder / (f"{name}.json" if number == 1 else f"{name}_{number}.json")
        if not path.exists() or _settings(path) == json.loads(json.dumps(settings)):
            return path
        number += 1


def save_result(path: Path, metrics: Mapping[str, float], settings: Mapping[str, Any]) -> None:
    """Write metrics with the settings they depend on; what is undefined becomes null."""
    known = {k: None if math.isnan(v) else v for k, v in metrics.items()}
    path.write_text(json.dumps({"settings": settings, "metrics": known}, indent=2) + "\n")


def load_metrics(path: Path) -> dict[str, float]:
    """The defined metrics of a file of `save_result`."""
    metrics = json.loads(path.read_text())["metrics"]
    return {name: value for name, value in metrics.items() if value is not None}


def _settings(path: Path) -> Any:
    try:
        return json.loads(path.read_text())["settings"]
    except (ValueError, KeyError, TypeError):
        return None
