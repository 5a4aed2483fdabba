"""``python -m models compare A B``: two tests of the same scans, compared in pairs."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import binomtest, norm

from models import numbers
from models.errors import UseError
from models.intervals import placements
from models.metrics import Array
from models.predictions import read_outputs
from models.tables import read_table


@dataclass(frozen=True)
class Comparison:
    """Two classifiers on the same scans.

    Attributes:
        scans: number of scans.
        only_first: scans that only the first one is right about.
        only_second: likewise.
        mcnemar_p: exact p-value of that difference (McNemar).
        areas: AUROC of each; NaN for more than two classes, and where nobody is of one of them.
        delong_p: p-value of their difference (DeLong et al. 1988); NaN for fewer than two people of
            a class.
    """

    scans: int
    only_first: int
    only_second: int
    mcnemar_p: float
    areas: tuple[float, float]
    delong_p: float


def compare(first: Array, second: Array, labels: Array) -> Comparison:
    """Compare probabilities (n, K) of two classifiers for the labels (n,), one scan a person."""
    right = [values.argmax(axis=1) == labels for values in (first, second)]
    only = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
    p = float(binomtest(only[0], sum(only)).pvalue) if sum(only) else 1.0
    nan = float("nan")
    fewest = np.bincount(labels, minlength=2).min()
    if first.shape[1] != 2 or fewest < 1:
        return Comparison(len(labels), *only, p, (nan, nan), nan)
    parts = [placements(values[:, 1], labels == 1) for values in (first, second)]
    if fewest < 2:  # one person has no variance
        return Comparison(len(labels), *only, p, (parts[0][0], parts[1][0]), nan)
    hits, misses = (np.stack([part[k] for part in parts]) for k in (1, 2))
    contrast = np.array([1.0, -1.0])
    covariance = np.cov(hits) / hits.shape[1] + np.cov(misses) / misses.shape[1]
    variance = float(contrast @ covariance @ contrast)
    gap = parts[0][0] - parts[1][0]
    delong = 2 * float(norm.sf(abs(gap) / np.sqrt(variance))) if variance > 0 else float(gap == 0)
    return Comparison(len(labels), *only, p, (parts[0][0], parts[1][0]), delong)


def read_pair(first: Path, second: Path) -> tuple[Array, Array, Array]:
    """Outputs (n, K) of two tables of predictions, and the labels (n,); one scan a person.

    Raises:
        UseError: they are of other scans, or say other labels.
    """
    tables = []
    for path in (first, second):
        table = path / "test_predictions.tsv" if path.is_dir() else path
        if not table.is_file():
            raise UseError(f"There is no table of predictions {table}; run `models test` first.")
        tables.append({row["image_id"]: row for row in read_table(table)})
    if tables[0].keys() != tables[1].keys():
        alike = len(tables[0].keys() & tables[1].keys())
        raise UseError(
            f"{first} and {second} are tests of other scans ({alike} of {len(tables[0])} and "
            f"{len(tables[1])} are the same); give both runs one split file."
        )
    seen: dict[str, str] = {}
    for name in sorted(tables[0]):
        seen.setdefault(tables[0][name]["subject"], name)
    names = sorted(seen.values())
    ours, theirs = (read_outputs([table[name] for name in names]) for table in tables)
    if ours[2] != theirs[2] or not np.array_equal(ours[1], theirs[1]):
        raise UseError(f"{first} and {second} have other labels for the same scans.")
    return ours[0], theirs[0], ours[1]


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m models compare",
        description="Compare two runs, or two tables of predictions, on the same test scans.",
        allow_abbrev=False,
    )
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    options = parser.parse_args(arguments)
    first, second, labels = read_pair(options.first, options.second)
    if first.shape[1] == 1:
        errors = numbers.compare(first[:, 0], second[:, 0], labels)
        both = " and ".join(f"{error:.3f}" for error in errors.errors)
        print(
            f"{errors.people} people\nmean absolute error {both}; paired t-test p = {errors.p:.3g}"
        )
        return
    found = compare(first, second, labels)
    print(f"{found.scans} people")
    print(
        f"right about only by the first: {found.only_first}, only by the second: "
        f"{found.only_second}; McNemar's exact p = {found.mcnemar_p:.3g}"
    )
    if not np.isnan(found.areas[0]):
        areas = " and ".join(f"{area:.3f}" for area in found.areas)
        known = "" if np.isnan(found.delong_p) else f"; DeLong's p = {found.delong_p:.3g}"
        print(f"AUROC {areas}{known}")
