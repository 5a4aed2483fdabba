"""What a model said about each scan: collected over batches and ranks, written as one table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from models.metrics import Array
from models.tasks import is_number

Scale = tuple[float, float]
"""Mean and standard deviation of a number over the training scans."""


def told(scores: Tensor, scale: Scale | None) -> Tensor:
    """What scores (n, K) of a network say: probabilities (n, K), or the number (n, 1).

    Args:
        scores: of classes, or of a number in standard deviations from its mean.
        scale: of the number; None: they are of classes.
    """
    return scores.softmax(dim=1) if scale is None else scores * scale[1] + scale[0]


@dataclass(frozen=True)
class Prediction:
    """What a model said about one scan.

    Attributes:
        subject: whose scan it is.
        image_id: image ID of the scan.
        label: index of its true class, or the true number; None: not known.
        outputs: probabilities of the classes, in the order of the labels; or the number told.
    """

    subject: str
    image_id: str
    label: float | None
    outputs: tuple[float, ...]

    @property
    def true_class(self) -> int:
        """Index of its true class, which is known."""
        assert self.label is not None
        return int(self.label)


@dataclass
class Predictions:
    """The predictions of one pass over a data loader.

    Attributes:
        mine: those of this rank since the last `gathered`.
    """

    mine: list[Prediction] = field(default_factory=list)

    def add(self, batch: Mapping[str, Any], outputs: Tensor) -> None:
        """Add a batch; one without ids gets numbers, so that every scan is a subject of its own."""
        count = len(outputs)
        numbers = [f"{_rank()}-{len(self.mine) + i}" for i in range(count)]
        labels = batch["label"].tolist() if "label" in batch else [None] * count
        subjects = batch.get("subject", numbers)
        names = batch.get("image_id", numbers)
        # float32 at least: bfloat16 has no numpy, and three digits
        rows = outputs.detach().to("cpu", torch.float32).tolist()
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
    """Outputs (n, K), labels (n,) and subjects of the predictions that have a label."""
    known = [row for row in predictions if row.label is not None]
    return (
        np.array([row.outputs for row in known]),
        np.array([row.label for row in known]),
        [row.subject for row in known],
    )


def table_rows(
    predictions: Iterable[Prediction],
    class_names: Sequence[str],
    details: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """One row per scan: ids, label, predicted class, P(class) each, and what else is known.

    Where the task is a number: ids, the true one, the one told, and their difference.

    Args:
        predictions: What was said.
        class_names: Names of the classes, in the order of the labels.
        details: More columns by image ID, the same ones for every scan.
    """
    columns = list(dict.fromkeys(name for values in details.values() for name in values))
    rows = []
    for scan in predictions:
        known = details.get(scan.image_id, {})
        said = _number if is_number(class_names) else _class
        rows.append(
            {"subject": scan.subject, "image_id": scan.image_id}
            | {"label": "" if scan.label is None else scan.label}
            | said(scan, class_names)
            | {name: known.get(name, "") for name in columns}
        )
    return rows


_TOLD = "predicted_"
_PROBABILITY = "p_"


def _class(scan: Prediction, names: Sequence[str]) -> dict[str, Any]:
    return {
        "class": "" if scan.label is None else names[scan.true_class],
        "predicted": names[int(np.argmax(scan.outputs))],
    } | {f"{_PROBABILITY}{name}": p for name, p in zip(names, scan.outputs)}


def _number(scan: Prediction, names: Sequence[str]) -> dict[str, Any]:
    (told,) = scan.outputs
    return {
        f"{_TOLD}{names[0]}": told,
        "error": "" if scan.label is None else told - scan.label,
    }


def read_outputs(rows: Sequence[Mapping[str, str]]) -> tuple[Array, Array, list[str]]:
    """Outputs (n, K), labels (n,) and class names of a table of predictions, where labels are."""
    known = [row for row in rows if row["label"]]
    columns = list(known[0]) if known else []
    for start, kind in ((_PROBABILITY, int), (_TOLD, float)):
        own = [name for name in columns if name.startswith(start)]
        if own:
            outputs = np.array([[float(row[name]) for name in own] for row in known])
            labels = np.array([kind(row["label"]) for row in known])
            return outputs, labels, [name.removeprefix(start) for name in own]
    return np.empty((0, 0)), np.empty(0), []


def _rank() -> int:
    together = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if together else 0


def _of_all_ranks(mine: list[Prediction]) -> list[Prediction]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    everyone: list[list[Prediction]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(everyone, mine)
    return [row for rows in everyone for row in rows]
