"""What a network has to beat: a regression on age, sex and a volume of the prepared scan.

It is a logistic one of classes, and a linear one of a number; age is not used to tell age. It is
fitted to the first scan of each person that the network was trained on, and tested on the scans of
the network's own test. The volume is that of the tissue around the hippocampi where scans are
registered to MNI152, else that of the head. Numbers that are not known are the training mean.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from datamodules.background import otsu
from datamodules.records import ScanRecord
from datamodules.space import MNI_MIDDLE
from models import numbers
from models.compare import compare
from models.localisation import REGIONS
from models.metrics import Array
from models.predictions import Prediction

_KNOWN = 0.5  # share of the training scans for which a number must be known
_SURE = 0.05


class Baseline(NamedTuple):
    """A baseline and what it says of the test scans.

    Attributes:
        features: names of what it looks at.
        predictions: of the scans of the network's test, in the same order.
    """

    features: tuple[str, ...]
    predictions: list[Prediction]


def fit_baseline(datamodule: Any, tested: Sequence[Prediction]) -> Baseline:
    """Fit it to the training scans of a data module, and predict the tested ones.

    Args:
        datamodule: an ``ADNIDataModule`` that is set up.
        tested: what the network said of the scans of the test.
    """
    # seconds to import, and only this needs them
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    registered = datamodule.preprocessing["middle_mm"] == list(MNI_MIDDLE)
    volume = "tissue around the hippocampi" if registered else "volume of the head"
    names = np.array(["age", "sex", volume])
    train = _rows(datamodule, "train", registered)
    test = _rows(datamodule, "test", registered)
    first: dict[str, ScanRecord] = {}
    for record, _ in sorted(train, key=lambda row: row[0].order):
        first.setdefault(record.subject, record)
    own = [(record, values) for record, values in train if first[record.subject] is record]
    inputs = np.array([values for _, values in own])
    kept = (np.isfinite(inputs).mean(axis=0) >= _KNOWN) & (names != datamodule.task.number)
    number = bool(datamodule.task.number)
    regression = LinearRegression() if number else LogisticRegression(max_iter=1000)
    model = make_pipeline(SimpleImputer(), StandardScaler(), regression)
    model.fit(inputs[:, kept], [r.target if number else r.label for r, _ in own])
    by_scan = {record.image_id: values for record, values in test}
    asked = np.array([by_scan[row.image_id] for row in tested])
    tell = model.predict if number else model.predict_proba
    said = [
        Prediction(row.subject, row.image_id, row.label, tuple(np.atleast_1d(values).tolist()))
        for row, values in zip(tested, tell(asked[:, kept]))
    ]
    return Baseline(tuple(names[kept].tolist()), said)


def _rows(datamodule: Any, part: str, registered: bool) -> list[tuple[ScanRecord, list[float]]]:
    """Age, sex and volume of each scan of a part; NaN: not known."""
    sexes = {"F": 0.0, "M": 1.0}
    dataset, rows = datamodule.dataset(part), []
    for number, record in enumerate(datamodule.scans(part)):
        item = dataset[number]
        image, affine = item["image"][0].numpy(), item["affine"].numpy()
        inside = hippocampal(image, affine) if registered else float((image != 0).sum())
        age = float("nan") if record.age is None else record.age
        rows.append((record, [age, sexes.get(record.sex, float("nan")), inside]))
    return rows


def hippocampal(image: Array, affine: Array) -> float:
    """Voxels of tissue in the boxes around both hippocampi, what is half fluid counting half.

    Args:
        image: (D, H, W) a prepared scan in the space of MNI152.
        affine: (4, 4), from its voxels to the millimetres of that space.
    """
    axes = [affine[k, k] * np.arange(n) + affine[k, 3] for k, n in enumerate(image.shape)]
    total = 0.0
    for side in ("left hippocampus", "right hippocampus"):
        inside = [(axis >= low) & (axis <= high) for axis, (low, high) in zip(axes, REGIONS[side])]
        box = image[np.ix_(*inside)]
        levels = box[box != 0]
        dark = otsu(levels - levels.min()) + levels.min() if levels.size else 0.0
        fluid, solid = levels[levels <= dark], levels[levels > dark]
        if fluid.size and solid.size:
            low, high = np.median(fluid), np.median(solid)
            total += float(np.clip((levels - low) / (high - low), 0, 1).sum())
    return total


def verdict(network: Sequence[Prediction], baseline: Baseline) -> str:
    """Whether the network beats the baseline, in a sentence; of each person one scan counts."""
    first = {row.subject: number for number, row in reversed(list(enumerate(network)))}
    rows = sorted(first.values())
    both = [np.array([said[k].outputs for k in rows]) for said in (network, baseline.predictions)]
    labels = np.array([network[k].label for k in rows])
    if both[0].shape[1] == 1:
        said_of = numbers.compare(both[0][:, 0], both[1][:, 0], labels)
        ours, theirs = (-error for error in said_of.errors)
        errors = " and ".join(f"{error:.2f}" for error in said_of.errors)
        return _beaten(
            "linear", baseline, ours, theirs, said_of.p, f"mean absolute error {errors}", rows
        )
    found = compare(both[0], both[1], labels)
    if np.isfinite(found.areas).all():
        ours, theirs, p = *found.areas, found.delong_p
        said = f"AUROC {ours:.3f} and {theirs:.3f}"
    else:
        ours, theirs = ((one.argmax(axis=1) == labels).mean() for one in both)
        p, said = found.mcnemar_p, f"accuracy {ours:.3f} and {theirs:.3f}"
    return _beaten("logistic", baseline, ours, theirs, p, said, rows)


def _beaten(
    kind: str,
    baseline: Baseline,
    ours: float,
    theirs: float,
    p: float,
    said: str,
    rows: Sequence[int],
) -> str:
    """The sentence, from a measure of both of which more is better."""
    simple = f"a {kind} regression on {', '.join(baseline.features)}"
    difference = f"{said}, p = {p:.2g} for the difference, {len(rows)} people"
    if ours <= theirs:
        return f"The network does not beat {simple}: {difference}."
    if not p < _SURE:
        return f"The network is not shown to beat {simple}: {difference}."
    return f"The network beats {simple}: {difference}."
