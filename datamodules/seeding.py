"""Random numbers of the augmentation.

MONAI's transforms keep generators of their own, which neither Lightning's nor PyTorch's seeding of
loader processes reaches in a way that differs over ranks *and* processes. So they are set for every
single scan, from the run's seed, the epoch and the scan's ID: the same run gives the same images
whatever the number of loader processes and ranks, and no two of them draw the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from monai.data.utils import set_rnd
from torch.utils.data import DataLoader


class Draws:
    """Decides the random numbers of each scan in each epoch.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # loader processes live on

    @property
    def epoch(self) -> int:
        """The epoch that is drawn for, in this process and in its loader processes."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch.fill_(number)

    def seed(self, transform: Any, image_id: str) -> None:
        """Set the generators of the random transforms within ``transform`` for one scan."""
        digest = hashlib.sha256(f"{self._seed}|{self.epoch}|{image_id}".encode()).digest()
        set_rnd(transform, int.from_bytes(digest[:4], "little"))


class EpochLoader(DataLoader[Any]):
    """A loader that tells its data set which epoch begins.

    Args:
        draws: of the data set.
        current_epoch: says which epoch begins; None counts them.
    """

    def __init__(
        self,
        *args: Any,
        draws: Draws | None = None,
        current_epoch: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.draws, self.current_epoch = draws, current_epoch
        self._epochs = 0

    def __iter__(self) -> Any:
        """Begin an epoch."""
        if self.draws is not None:
            self.draws.epoch = self.current_epoch() if self.current_epoch else self._epochs
        self._epochs += 1
        return super().__iter__()
