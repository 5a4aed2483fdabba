"""Random numbers of the augmentation.

MONAI's transforms keep generators of their own, which neither Lightning's nor PyTorch's seeding of
workers reaches in a way that differs over ranks *and* workers. So every loader process sets them
from the run's seed, its rank and its number.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from monai.data.utils import set_rnd
from torch.utils.data import Dataset, get_worker_info


def mixed_seed(seed: int, rank: int, worker: int) -> int:
    """One 32-bit seed out of three numbers, without the collisions that adding them gives."""
    return int(np.random.SeedSequence([seed % 2**63, rank, worker]).generate_state(1)[0])


def seed_transforms(dataset: Dataset[object], seed: int, rank: int, worker: int = 0) -> None:
    """Seed every random transform of ``dataset``."""
    set_rnd(dataset, mixed_seed(seed, rank, worker))


def seed_worker(worker: int, rank: int) -> None:
    """Seed all generators of a loader process; to be used as ``worker_init_fn``."""
    info = get_worker_info()
    if info is None:
        return
    base = info.seed - worker  # drawn once per epoch from the run's generator
    seed_transforms(info.dataset, base, rank, worker)
    seed = mixed_seed(base, rank, worker)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
