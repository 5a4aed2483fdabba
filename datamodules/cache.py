"""Scans as items, with the slow part of their preparation kept on disk."""

# mypy: allow-untyped-calls
# (half of MONAI carries no annotations)
from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import monai
import torch
from monai.data.dataset import PersistentDataset
from monai.data.utils import pickle_hashing
from monai.transforms.compose import Compose
from monai.transforms.transform import Transform
from torch import Tensor

from .atomic import not_writable
from .errors import ScanReadError
from .records import ScanRecord
from .seeding import Draws

_EMPTY = 0.05  # standard deviation of a prepared image, which is about 1 within the head
_LEFT_S = 3600.0  # nobody takes so long to write one scan
_VERSION = 4  # raise it when a transform of ours changes what it computes


class Item(TypedDict):
    """One sample: plain tensors and strings, ready for the default collate function.

    Attributes:
        image: (1, D, H, W) float32.
        label: () int64, index into the task's class names; () float32, where it is a number.
        subject: canonical PTID.
        image_id: image ID of the scan.
        affine: (4, 4) float32, voxels to mm.
    """

    image: Tensor
    label: Tensor
    subject: str
    image_id: str
    affine: Tensor


class ScanDataset(PersistentDataset):
    """Scans of the given records, prepared by transforms whose fixed part is cached.

    The cache is keyed by the content of the file, the fixed transforms with their settings and the
    version of MONAI; it holds image and affine only, never a label. Its files are complete or not
    there, whoever else writes to the same folder; they are mapped into memory, so that all
    processes share what the system keeps of them. One that is damaged, or was changed by whatever
    means, is made again; one that cannot be written costs speed, not the run.

    Args:
        records: what to load; labels and identities are taken from here at every access.
        fixed: deterministic transforms, from ``{"image": path}`` to image and affine.
        random: transforms drawn anew at every access.
        cache_dir: where prepared scans are kept; None switches the cache off.
        draws: decides the random numbers of ``random``; None leaves them to MONAI's generators.
    """

    def __init__(
        self,
        records: Sequence[ScanRecord],
        fixed: Sequence[Transform],
        random: Sequence[Transform] = (),
        cache_dir: Path | None = None,
        *,
        draws: Draws | None = None,
    ) -> None:
        if cache_dir is not None:
            try:
                cache_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise not_writable(cache_dir, error) from None
        super().__init__(
            data=list(records),
            transform=Compose([*fixed, *random]),
            cache_dir=cache_dir,
            hash_func=_content_hash,
            hash_transform=pickle_hashing,
        )
        self._remove_leftovers()
        self.draws = draws

    def _transform(self, index: int) -> Item:
        record: ScanRecord = self.data[index]
        prepared = self._cachecheck(record)
        if self.draws is not None:
            self.draws.seed(self.transform, record.image_id)
        prepared = self._post_transform(prepared)
        return Item(
            image=prepared["image"],
            label=(
                torch.tensor(record.label, dtype=torch.int64)
                if record.target is None
                else torch.tensor(record.target, dtype=torch.float32)
            ),
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
            cached: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
            kept = {"image": cached["image"], "affine": cached["affine"]}
            if _checksum(kept) != cached["checksum"]:
                raise ValueError("its content is not what was written")
            return kept
        except FileNotFoundError:
            pass
        except Exception as error:  # whatever a damaged file makes of the unpickler
            warnings.warn(f"cache file {path} is damaged ({error!r}); made again", stacklevel=2)
        prepared = self._prepare(record)
        _save(path, prepared)
        return prepared

    def _remove_leftovers(self) -> None:
        """What processes that were killed had begun to write."""
        for part in self.cache_dir.glob(".*.part") if self.cache_dir is not None else ():
            with contextlib.suppress(OSError):  # another process removes it
                if time.time() - part.stat().st_mtime > _LEFT_S:
                    part.unlink()

    def kept(self) -> Kept:
        """How many of the scans are in the cache now, and the bytes they take."""
        sizes = []
        if self.cache_dir is not None:
            names = {self.cache_name(record) for record in self.data}
            with os.scandir(self.cache_dir) as entries:
                sizes = [entry.stat().st_size for entry in entries if entry.name in names]
        return Kept(len(sizes), len(self.data), sum(sizes), self.cache_dir)

    def cache_name(self, record: ScanRecord) -> str:
        """Name of the cache file: content, transforms and versions."""
        parts = f"{_VERSION}|{monai.__version__}|{self.transform_hash}"
        return f"{self.hash_func(record).decode()}-{hashlib.sha256(parts.encode()).hexdigest()}.pt"

    def _prepare(self, record: ScanRecord) -> dict[str, Tensor]:
        try:
            status = Path(record.path).stat()
            if (status.st_size, status.st_mtime_ns) != (record.bytes, record.mtime_ns):
                raise OSError("the file has changed since it was checked")
            if record.sha256:  # it may have been replaced at the same size and time
                with Path(record.path).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != record.sha256:
                    raise OSError("the file has changed since it was checked")
            prepared = self._pre_transform({"image": record.path})
        except Exception as error:
            raise ScanReadError(
                "UNREADABLE",
                f"{record.subject} {record.image_id}: {type(error).__name__}: {error}",
                record.path,
                "run `python -m datamodules check` on the data folder",
            ) from error
        if not bool(prepared["image"].isfinite().all()) or float(prepared["image"].std()) < _EMPTY:
            raise ScanReadError(
                "CONSTANT",
                f"{record.subject} {record.image_id}: nothing is left of the scan when prepared",
                record.path,
                "look at the scan: is the head within spatial_shape, and nothing brighter by far?",
            )
        # the rest of the dictionary is not needed, and views of larger arrays would be stored whole
        return {key: prepared[key].contiguous().clone() for key in ("image", "affine")}


@dataclass(frozen=True)
class Kept:
    """What a cache holds of a data set.

    Attributes:
        scans: number of scans that are in the cache.
        of: number of scans of the data set.
        bytes: size of their files in the cache.
        folder: of the cache; None: nothing is kept on disk.
    """

    scans: int
    of: int
    bytes: int
    folder: Path | None

    def __str__(self) -> str:
        if self.folder is None:
            return "prepared scans are not kept on disk"
        share = f"{self.scans} of {self.of} scans ({self.scans / max(self.of, 1):.0%})"
        return f"prepared and kept: {share}, {self.bytes / 1e9:.2f} GB in {self.folder}"


def _content_hash(record: ScanRecord) -> bytes:
    return (record.sha256 or f"{record.path}|{record.bytes}|{record.mtime_ns}").encode()


def _checksum(prepared: dict[str, Tensor]) -> int:
    """PyTorch stores one and does not look at it; a few milliseconds a scan."""
    return zlib.crc32(prepared["affine"].numpy().data, zlib.crc32(prepared["image"].numpy().data))


def _save(path: Path, prepared: dict[str, Tensor]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        torch.save({**prepared, "checksum": _checksum(prepared)}, part)
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        warnings.warn(f"cannot keep a prepared scan in {path.parent}: {error}", stacklevel=2)
    finally:
        part.unlink(missing_ok=True)
