"""What a network was trained on, kept in its checkpoint, to tell whether a new scan is like it.

Ranges of age, voxel size and the intensities within the head; field strengths; where the network's
own features of the training scans lie; and the temperature that calibrates its probabilities on the
validation scans, or what it tells wrong of a number there. Plain numbers and tensors, and nothing
of any single person.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from models import numbers
from models.metrics import Array
from models.predictions import Scale, told
from models.tasks import is_number

KEY = "reference"
"""Entry of a checkpoint."""
FEW = 20
"""Validation scans: a temperature and a threshold of fewer are chance."""
MOST = 500
"""Scans of a part that are looked at."""
PERCENTILES = (5, 25, 50, 75, 95)
_MARGIN = 0.5  # standard deviations around a range: the next scan may be a little further out
_LIMIT = 1.2  # times the largest distance of a validation scan


@dataclass(frozen=True)
class Reference:
    """What training scans were like.

    Attributes:
        class_names: of the task, in the order of the labels.
        scans: number of training scans of each class; of a number, of all under its name.
        ranges: lowest and highest value by name: ``age``, ``voxel_mm`` and those of `intensities`.
        field_strengths: in tesla; empty: not known.
        temperature: that scores are divided by for calibrated probabilities.
        calibrated_on: number of validation scans it was found on.
        threshold: calibrated probability of the last class from which on it is called, chosen on
            the validation scans; 0.5 for more than two classes, and for a number.
        centre: (C,) mean of the network's features.
        precision: (C, C) inverse of their covariance.
        limit: distance beyond which no held-out scan lay.
        extremes: as ``ranges``, without the margin; empty: an older checkpoint does not know.
        usual: mean of coarse images of the training scans; None: they were too few to say.
        least: correlation with it below which a scan is no head like them.
        error: mean absolute error on the validation scans, of a number; None: classes are told.
        correction: what is told wrong there on average, intercept and slope over the number.
    """

    class_names: tuple[str, ...]
    scans: dict[str, int]
    ranges: dict[str, tuple[float, float]]
    field_strengths: tuple[float, ...]
    temperature: float
    calibrated_on: int
    threshold: float
    centre: Tensor
    precision: Tensor
    limit: float
    extremes: dict[str, tuple[float, float]] = field(default_factory=dict)
    usual: Tensor | None = None
    least: float = 0.0
    error: float | None = None
    correction: tuple[float, float] | None = None

    @property
    def counted(self) -> str:
        """Training scans in words: ``5 NC, 4 AD``; of a number, ``9 scans``."""
        if is_number(self.class_names):
            return f"{sum(self.scans.values())} scans"
        return ", ".join(f"{count} {name}" for name, count in self.scans.items())

    def distance(self, features: Tensor) -> float:
        """Mahalanobis distance of features (C,) from those of the training scans."""
        away = features.double() - self.centre.double()
        return float((away @ self.precision.double() @ away).clamp_min(0).sqrt())

    def calibrated(self, scores: Tensor) -> Tensor:
        """Probabilities (n, K) of scores (n, K)."""
        return (scores / self.temperature).softmax(dim=-1)

    def outside(self, values: Mapping[str, float | None]) -> dict[str, str]:
        """What lies outside of the training scans' range, in words, by name; unknown is not."""
        found = {}
        for name, value in values.items():
            if value is None or name not in self.ranges:
                continue
            low, high = self.ranges[name]
            if not low <= value <= high:
                low, high = self.extremes.get(name, (low, high))
                found[name] = f"{value:.4g}, trained on {low:.4g} to {high:.4g}"
        return found


def intensities(image: Array, voxel_ml: float) -> dict[str, float]:
    """Numbers that describe a prepared image (D, H, W): the head's volume, and its grey levels."""
    head = image[image != 0]
    levels = np.percentile(head, PERCENTILES) if head.size else [0.0] * len(PERCENTILES)
    named = {f"intensity_p{p}": float(level) for p, level in zip(PERCENTILES, levels)}
    return {"head_ml": head.size * voxel_ml} | named


@dataclass
class Noted:
    """What a forward pass gave: scores (n, K), and what the last layer saw, features (n, F)."""

    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    features: Tensor = field(default_factory=lambda: torch.empty(0))


@contextmanager
def noting(network: nn.Module) -> Iterator[Noted]:
    """Note what the next forward pass of a network gives, whoever runs it."""
    noted = Noted()

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        noted.scores, noted.features = output.detach().float(), inputs[0].detach().float()

    handle = network.get_submodule("classifier").register_forward_hook(note)
    try:
        yield noted
    finally:
        handle.remove()


def scores_and_features(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (n, K) of images (n, C, D, H, W), and what the last layer sees (n, F)."""
    with noting(network) as noted, torch.no_grad():
        network(images)
    return noted.scores, noted.features


def measure(network: nn.Module, datamodule: Any, scale: Scale | None = None) -> Reference:
    """Look at training and validation scans with a trained network, in evaluation mode.

    Of many training scans ``MOST`` are looked at, evenly spread over them.

    Args:
        network: of the checkpoint, on one device.
        datamodule: an ``ADNIDataModule`` that is set up.
        scale: of the number that it tells; None: it tells classes.
    """
    from sklearn.covariance import LedoitWolf  # a second that only this needs

    network.eval()
    train, validation = (_seen(network, datamodule, part) for part in ("train", "val"))
    spread = LedoitWolf().fit(train.features.numpy())
    records = datamodule.scans("train")
    measures = {"age": [record.age for record in records if record.age is not None]}
    measures["voxel_mm"] = [float(size) for record in records for size in record.zooms.split()]
    for name in train.intensities[0]:
        measures[name] = [values[name] for values in train.intensities]
    names = tuple(datamodule.class_names)
    kind = _of_classes(validation) if scale is None else _of_number(validation, scale)
    usual, least = datamodule.usual_head() or (None, 0.0)
    found = Reference(
        class_names=names,
        scans={name: sum(r.label == k for r in records) for k, name in enumerate(names)},
        ranges={name: _range(values) for name, values in measures.items() if values},
        field_strengths=tuple(sorted({r.field_strength for r in records if r.field_strength})),
        calibrated_on=len(validation.labels),
        centre=torch.tensor(spread.location_, dtype=torch.float32),
        precision=torch.tensor(spread.precision_, dtype=torch.float32),
        limit=0.0,
        extremes={name: (min(values), max(values)) for name, values in measures.items() if values},
        usual=usual,
        least=least,
        **kind,
    )
    far = [found.distance(f) for f in (*train.features, *validation.features)]
    return Reference(**{**found.__dict__, "limit": _LIMIT * max(far)})


def _of_classes(validation: "_Seen") -> dict[str, Any]:
    warmth, labels = temperature(validation.scores, validation.labels), validation.labels
    calibrated = (validation.scores / warmth).softmax(dim=1)
    two = calibrated.shape[1] == 2
    place = threshold(calibrated[:, -1], labels) if two else 0.5
    return {"temperature": warmth, "threshold": place}


def _of_number(validation: "_Seen", scale: Scale) -> dict[str, Any]:
    said, true = told(validation.scores, scale)[:, 0].double().numpy(), validation.labels.numpy()
    found = tuple(numbers.correction(said, true))
    error = numbers.evaluate(said, true)["mae"]
    return {"temperature": 1.0, "threshold": 0.5, "error": error, "correction": found}


@dataclass(frozen=True)
class _Seen:
    """What the network makes of the scans of a part.

    Attributes:
        scores: (n, K).
        features: (n, F), what its last layer sees.
        labels: (n,).
        intensities: of each scan.
    """

    scores: Tensor
    features: Tensor
    labels: Tensor
    intensities: list[dict[str, float]]


def _seen(network: nn.Module, datamodule: Any, part: str) -> _Seen:
    scores, features, labels = [], [], []
    levels: list[dict[str, float]] = []
    voxel_ml = datamodule.spacing_mm**3 / 1000
    device = next(network.parameters()).device
    dataset = datamodule.dataset(part)
    chosen = np.unique(np.linspace(0, len(dataset) - 1, min(MOST, len(dataset))).astype(int))
    subset = Subset(dataset, chosen.tolist())
    for batch in DataLoader(subset, batch_size=datamodule.batch_size):
        one, seen = scores_and_features(network, batch["image"].to(device))
        scores.append(one.cpu())
        features.append(seen.cpu())
        labels.append(batch["label"])
        levels += [intensities(image[0].numpy(), voxel_ml) for image in batch["image"]]
    return _Seen(torch.cat(scores), torch.cat(features), torch.cat(labels), levels)


def _range(values: Sequence[float]) -> tuple[float, float]:
    room = _MARGIN * float(np.std(values))
    return min(values) - room, max(values) + room


def temperature(scores: Tensor, labels: Tensor) -> float:
    """The number that scores (n, K) are divided by for the likeliest probabilities of the labels.

    Labels are not taken for certain (Platt 1999): n + 1 of n + 2 is what n scans can show, so that
    validation scans which are all right do not make every probability 0 or 1.
    """
    counts = torch.bincount(labels, minlength=scores.shape[1])
    sure = (counts + 1.0) / (counts + 2.0)
    targets = ((1 - sure[labels]) / (scores.shape[1] - 1))[:, None].repeat(1, scores.shape[1])
    targets[torch.arange(len(labels)), labels] = sure[labels]

    def loss(power: float) -> float:
        logs = (scores.double() / 10.0**power).log_softmax(dim=1)
        return float(-(targets * logs).sum(dim=1).mean())

    return float(10 ** minimize_scalar(loss, bounds=(-1.0, 1.5), method="bounded").x)


def threshold(positive: Tensor, labels: Tensor) -> float:
    """Where sensitivity and specificity have the largest sum (Youden), between two scans.

    Of several such places the one nearest to 0.5.

    Args:
        positive: (n,) probabilities of the last class.
        labels: (n,), 0 or 1.
    """
    values = torch.cat([torch.zeros(1), positive.float().cpu().unique(), torch.ones(1)])
    places = (values[1:] + values[:-1]) / 2
    called = positive.float().cpu()[None] > places[:, None]
    hits = (called & (labels == 1)).sum(dim=1) / (labels == 1).sum().clamp_min(1)
    misses = (called & (labels == 0)).sum(dim=1) / (labels == 0).sum().clamp_min(1)
    gain = (hits - misses).double()
    best = places[gain >= gain.max() - 1e-9]
    return float(best[(best - 0.5).abs().argmin()])


def corrected_gap(references: Sequence[Reference], number: float, true: float) -> float | None:
    """Told minus true, beyond what validation scans say is told wrong; None: not known."""
    lines = [
        numbers.Correction(*known.correction)
        for known in references
        if known.correction and known.calibrated_on >= FEW
    ]
    if not lines or len(lines) < len(references):
        return None
    return float(np.mean([line.gap(number, true) for line in lines]))


def to_checkpoint(path: Path, reference: Reference) -> None:
    """Add a reference to a Lightning checkpoint; the file is whole at every moment."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    plain = asdict(reference)
    plain["class_names"] = list(reference.class_names)
    checkpoint[KEY] = plain
    part = path.with_name(f".{path.name}.part")
    torch.save(checkpoint, part)
    part.replace(path)


def from_checkpoint(checkpoint: Mapping[str, Any]) -> Reference | None:
    """The reference in a checkpoint; None in one that has none."""
    plain = checkpoint.get(KEY)
    if plain is None:
        return None
    names = tuple(plain["class_names"])
    known: dict[str, Any] = {"extremes": {}, **plain}  # older checkpoints do not have them
    for kind in ("ranges", "extremes"):
        known[kind] = {name: (low, high) for name, (low, high) in known[kind].items()}
    fields, line = tuple(plain["field_strengths"]), plain.get("correction")
    known |= {"class_names": names, "field_strengths": fields}
    return Reference(**{**known, "correction": tuple(line) if line else None})
