"""What a model said about each scan: collected over batches and ranks, written as one table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from models.metrics import Array


@dataclass(frozen=True)
class Prediction:
    """What a model said about one scan.

    Attributes:
        subject: whose scan it is.
        image_id: image ID of the scan.
        label: index of its true class; None: not known.
        probabilities: one for each class, in the order of the labels.
    """

    subject: str
    image_id: str
    label: int | None
    probabilities: tuple[float, ...]


@dataclass
class Predictions:
    """The predictions of one pass over a data loader.

    Attributes:
        mine: those of this rank since the last `gathered`.
    """

    mine: list[Prediction] = field(default_factory=list)

    def add(self, batch: Mapping[str, Any], probabilities: Tensor) -> None:
        """Add a batch; one without ids gets numbers, so that every scan is a subject of its own."""
        count = len(probabilities)
        numbers = [f"{_rank()}-{len(self.mine) + i}" for i in range(count)]
        labels = batch["label"].tolist() if "label" in batch else [None] * count
        subjects = batch.get("subject", numbers)
        names = batch.get("image_id", numbers)
        # float32 at least: bfloat16 has no numpy, and three digits
        rows = probabilities.detach().to("cpu", torch.float32).tolist()
        self.mine += [
            Prediction(str(subject), str(name), label, tuple(row))
            for subject, name, label, row in zip(subjects, names, labels, rows)
        ]

    def gathered(self) -> list[Prediction]:
        """The predictions of all ranks, each scan once, in order of subject and image; starts anew.

        A distributed sampler repeats scans so that every rank has as many; they count once here.
        Every rank must call this.
        """
        found = {(row.subject, row.image_id): row for row in _of_all_ranks(self.mine)}
        self.mine = []
        return [found[key] for key in sorted(found)]


def arrays(predictions: Sequence[Prediction]) -> tuple[Array, Array, list[str]]:
    """Probabilities (n, K), labels (n,) and subjects of the predictions that have a label."""
    known = [row for row in predictions if row.label is not None]
    return (
        np.array([row.probabilities for row in known]),
        np.array([row.label for row in known], dtype=np.int64),
        [row.subject for row in known],
    )


def table_rows(
    predictions: Iterable[Prediction],
    class_names: Sequence[str],
    details: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """One row per scan: ids, label, predicted class, P(class) each, and what else is known.

    Args:
        predictions: What was said.
        class_names: Names of the classes, in the order of the labels.
        details: More columns by image ID, the same ones for every scan.
    """
    columns = list(dict.fromkeys(name for values in details.values() for name in values))
    rows = []
    for scan in predictions:
        known = details.get(scan.image_id, {})
        rows.append(
            {
                "subject": scan.subject,
                "image_id": scan.image_id,
                "label": "" if scan.label is None else scan.label,
                "class": "" if scan.label is None else class_names[scan.label],
                "predicted": class_names[int(np.argmax(scan.probabilities))],
            }
            | {f"p_{name}": p for name, p in zip(class_names, scan.probabilities)}
            | {name: known.get(name, "") for name in columns}
        )
    return rows


def _rank() -> int:
    together = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if together else 0


def _of_all_ranks(mine: list[Prediction]) -> list[Prediction]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    everyone: list[list[Prediction]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(everyone, mine)
    return [row for rows in everyone for row in rows]
