"""Scans as items, with the slow part of their preparation kept on disk."""

# mypy: allow-untyped-calls
# (half of MONAI carries no annotations)
from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import monai
import torch
from monai.data.dataset import PersistentDataset
from monai.data.utils import pickle_hashing
from monai.transforms.compose import Compose
from monai.transforms.transform import Transform
from torch import Tensor

from .errors import ScanReadError
from .records import ScanRecord

_VERSION = 1  # raise it when a transform of ours changes what it computes


class Item(TypedDict):
    """One sample: plain tensors and strings, ready for the default collate function.

    ``image`` (1, D, H, W) float32; ``label`` () int64; ``affine`` (4, 4) float32.
    """

    image: Tensor
    label: Tensor
    subject: str
    image_id: str
    affine: Tensor


class ScanDataset(PersistentDataset):
    """Scans of the given records, prepared by transforms whose fixed part is cached.

    The cache is keyed by the content of the file, the fixed transforms with their settings and the
    version of MONAI; it holds image and affine only, never a label. A damaged cache file is made
    again; one that cannot be written costs speed, not the run.

    Args:
        records: what to load; labels and identities are taken from here at every access.
        fixed: deterministic transforms, from ``{"image": path}`` to image and affine.
        random: transforms drawn anew at every access.
        cache_dir: where prepared scans are kept; None switches the cache off.
    """

    def __init__(
        self,
        records: Sequence[ScanRecord],
        fixed: Sequence[Transform],
        random: Sequence[Transform] = (),
        cache_dir: Path | None = None,
    ) -> None:
        super().__init__(
            data=list(records),
            transform=Compose([*fixed, *random]),
            cache_dir=cache_dir,
            hash_func=_content_hash,
            hash_transform=pickle_hashing,
        )

    def _transform(self, index: int) -> Item:
        record: ScanRecord = self.data[index]
        prepared = self._post_transform(self._cachecheck(record))
        return Item(
            image=prepared["image"],
            label=torch.tensor(record.label, dtype=torch.int64),
            subject=record.subject,
            image_id=record.image_id,
            affine=prepared["affine"],
        )

    def _cachecheck(self, item_transformed: ScanRecord) -> dict[str, Tensor]:
        record = item_transformed
        if self.cache_dir is None:
            return self._prepare(record)
        path = self.cache_dir / self.cache_name(record)
        try:
            cached: dict[str, Tensor] = torch.load(path, weights_only=True)
            return {"image": cached["image"], "affine": cached["affine"]}
        except FileNotFoundError:
            pass
        except Exception as error:  # whatever a damaged file makes of the unpickler
            warnings.warn(f"cache file {path} is damaged ({error!r}); made again", stacklevel=2)
        prepared = self._prepare(record)
        _save(path, prepared)
        return prepared

    def cache_name(self, record: ScanRecord) -> str:
        """Name of the cache file: content, transforms and versions."""
        parts = f"{_VERSION}|{monai.__version__}|{self.transform_hash}"
        return f"{self.hash_func(record).decode()}-{hashlib.sha256(parts.encode()).hexdigest()}.pt"

    def _prepare(self, record: ScanRecord) -> dict[str, Tensor]:
        try:
            status = Path(record.path).stat()
            if (status.st_size, status.st_mtime_ns) != (record.bytes, record.mtime_ns):
                raise OSError("the file has changed since it was checked")
            prepared = self._pre_transform({"image": record.path})
        except Exception as error:
            raise ScanReadError(
                "UNREADABLE",
                f"{record.subject} {record.image_id}: {type(error).__name__}: {error}",
                record.path,
                "run `python -m datamodules check` on the data folder",
            ) from error
        # the rest of the dictionary is not needed, and views of larger arrays would be stored whole
        return {key: prepared[key].contiguous().clone() for key in ("image", "affine")}


def _content_hash(record: ScanRecord) -> bytes:
    return (record.sha256 or f"{record.path}|{record.bytes}|{record.mtime_ns}").encode()


def _save(path: Path, prepared: dict[str, Tensor]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        torch.save(prepared, part)
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        warnings.warn(f"cannot keep a prepared scan in {path.parent}: {error}", stacklevel=2)
    finally:
        part.unlink(missing_ok=True)
