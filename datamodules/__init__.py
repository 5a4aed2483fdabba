"""Data for the ADNI use case: a LightningDataModule and a synthetic cohort.

The names below are loaded on first use, so that ``python -m datamodules synth`` does not wait for
Lightning and MONAI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adni import ADNIDataModule
    from .errors import DataError

__all__ = ["ADNIDataModule", "DataError"]


def __getattr__(name: str) -> Any:
    if name == "ADNIDataModule":
        from .adni import ADNIDataModule

        return ADNIDataModule
    if name == "DataError":
        from .errors import DataError

        return DataError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
