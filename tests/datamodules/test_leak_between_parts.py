"""A scan-level split leaks, ours does not: told from the pictures alone, by 1-nearest-neighbour.

Two visits of one person are nearly one scan. How alike visits and strangers are is learnt from the
training scans; a held-out scan whose nearest training scan is as alike as a visit has its own
subject there, and a network could answer by recognising people instead of the disease.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from datamodules import ADNIDataModule
from datamodules.cache import Item
from datamodules.synth import CohortSpec, generate


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leak")
    spec = CohortSpec((("AD", 9), ("NC", 9)), 8.0, "L1", visits=("bl", "m06", "m12"))
    generate(folder / "cohort", spec)
    made = ADNIDataModule(
        folder / "cohort",
        spatial_shape=(26, 32, 28),
        spacing_mm=8.0,
        val_fraction=0.25,
        test_fraction=0.25,
        eval_visits="all",
        cache_dir=folder / "cache",
    )
    made.prepare_data()
    made.setup()
    return made


def correlations(scans: list[Item], others: list[Item]) -> torch.Tensor:
    def rows(items: list[Item]) -> torch.Tensor:
        flat = torch.stack([item["image"].flatten() for item in items])
        flat = flat - flat.mean(dim=1, keepdim=True)
        return flat / flat.norm(dim=1, keepdim=True)

    return rows(scans) @ rows(others).T


def share_with_relatives(train: list[Item], held_out: list[Item]) -> float:
    """Share of the held-out scans whose nearest training scan is as alike as two visits are."""
    names = [item["subject"] for item in train]
    strangers = torch.tensor([[a != b for b in names] for a in names])
    alike = correlations(train, train)
    other_visit = ~strangers & ~torch.eye(len(train), dtype=torch.bool)
    limit = (alike[strangers].max() + alike[other_visit].min()) / 2
    nearest = correlations(held_out, train).max(dim=1).values
    return float((nearest > limit).double().mean())


def test_scan_level_split_is_detected_and_ours_is_not(module):
    train = list(module.dataset("train"))
    held_out = [*module.dataset("val"), *module.dataset("test")]
    assert share_with_relatives(train, held_out) == 0
    scans = [*train, *held_out]
    order = np.random.default_rng(0).permutation(len(scans))
    by_scan = [scans[i] for i in order]
    count = len(held_out)
    subjects = {item["subject"] for item in by_scan[count:]}
    torn = np.mean([item["subject"] in subjects for item in by_scan[:count]])
    found = share_with_relatives(by_scan[count:], by_scan[:count])
    assert found == torn > 0.5  # every one of them, and nobody else
