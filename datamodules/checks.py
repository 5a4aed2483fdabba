"""Reading every file to its end before the first training step.

MONAI and nibabel name no path when a file is cut off, and take a flipped bit in a gzip stream for
data, because they never read as far as the checksum. Here each file is read whole, once; results
are kept outside the data, keyed by path, size and times, so that the next start is quick.
"""

# mypy: allow-untyped-calls
# (most of nibabel carries no annotations)
from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import nibabel as nib
import numpy as np

from .atomic import write_atomically
from .content import same_pictures, sample_voxels
from .errors import Problem
from .profiles import is_stripped
from .records import ScanRecord

_VERSION = 5  # raise it when a check changes
_LARGEST_BYTES = 4 << 30  # of one volume, by its header
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class FileReport:
    """What is known of one file. ``code`` is empty for a good one; ``warnings`` do no harm."""

    code: str = ""
    detail: str = ""
    action: str = ""
    warnings: Mapping[str, str] = field(default_factory=dict)
    sha256: str = ""
    shape: str = ""
    zooms: str = ""
    axcodes: str = ""
    reach: str = ""
    sample: str = ""
    stripped: str = ""


class _Bad(Exception):
    def __init__(self, code: str, detail: str, action: str) -> None:
        super().__init__(code, detail, action)
        self.report = FileReport(code, detail, action)


_AGAIN = "download the file again"


@dataclass(frozen=True)
class Leniency:
    """What is repaired on loading instead of refused; counted as warnings."""

    nan: Literal["error", "zero"] = "error"
    """``zero``: voxels that are NaN or infinite become 0."""
    assume: Literal["", "RAS"] = ""
    """``RAS``: a file without orientation lies in that order."""


STRICT = Leniency()


def check_file(path: Path, leniency: Leniency = STRICT) -> FileReport:
    """Read one file to its end and say what is wrong with it, or describe it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return FileReport("NOT_FOUND", "the file has gone", _AGAIN)
    except OSError as error:
        return FileReport("UNREADABLE", f"{error.strerror}", "check rights and disk")
    try:
        image = _parse(path, data)
        report, affine = _check_geometry(image, leniency)
        values, warnings = _check_values(image, leniency)
    except _Bad as bad:
        return bad.report
    return replace(
        report,
        warnings={**report.warnings, **warnings},
        sha256=hashlib.sha256(data).hexdigest(),
        reach=_reach(values, affine),
        sample=sample_voxels(values, affine),
        stripped=is_stripped(values, abs(float(np.linalg.det(affine[:3, :3])))),
    )


def _reach(values: Any, affine: Any) -> str:
    """Sides in mm, in RAS order, of the box around the middle that holds all but the background.

    Background is what equals the corner.
    """
    order = nib.io_orientation(affine)
    tissue = nib.orientations.apply_orientation(values != values[0, 0, 0], order)
    sizes = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))[order[:, 0].argsort()]
    reach = []
    for axis, size in enumerate(sizes):
        rest = tuple(other for other in range(3) if other != axis)
        places = np.flatnonzero(tissue.any(axis=rest)) - (tissue.shape[axis] - 1) / 2
        reach.append(f"{(2 * np.abs(places).max() + 1) * size:.0f}")
    return " ".join(reach)


def _parse(path: Path, data: bytes) -> Any:
    """The image in ``data``, the gzip checksum verified."""
    if not data:
        raise _Bad("EMPTY", "0 bytes", _AGAIN)
    gzipped = data.startswith(_GZIP)
    kind, expected = _read_header(_start(data) if gzipped else data[:540], gzipped)
    if gzipped != path.name.lower().endswith(".gz"):
        right = path.name + ".gz" if gzipped else path.name[: -len(".gz")]
        what = "gzipped" if gzipped else "not gzipped"
        raise _Bad("WRONG_SUFFIX", f"the content is {what}", f"rename it to {right}")
    if gzipped:
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise _Bad("CORRUPT_GZIP", f"{error}", _AGAIN) from None
    if len(data) < expected:
        raise _Bad("TRUNCATED", f"{len(data)} bytes where {expected} are promised", _AGAIN)
    try:
        return kind.from_bytes(data)
    except (ValueError, OSError, nib.spatialimages.HeaderDataError) as error:
        raise _Bad("NOT_NIFTI", f"{error}", _AGAIN) from None


def _read_header(header: bytes, gzipped: bool) -> tuple[Any, int]:
    """Image class and promised bytes, from the first bytes of the unpacked file."""
    kind = _nifti_class(header)
    if kind is None and gzipped and len(header) < 348:
        raise _Bad("CORRUPT_GZIP", "the gzip stream breaks off within the header", _AGAIN)
    if kind is None:
        raise _Bad("NOT_NIFTI", f"starts with {header[:24]!r}", _AGAIN)
    raw = kind.header_class(header[: kind.header_class.template_dtype.itemsize], check=False)
    zooms = raw["pixdim"][1:4]
    if not (np.isfinite(zooms).all() and (zooms > 0).all()):  # nibabel would make it 1 mm
        raise _Bad("BAD_PIXDIM", f"voxel size {zooms.tolist()} mm", "convert again from DICOM")
    expected = _volume_end(raw)
    if expected > _LARGEST_BYTES:  # before anything of that size is asked for
        raise _Bad("TOO_LARGE", f"the header claims {expected / 2**30:.0f} GiB", _AGAIN)
    return kind, expected


def _start(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(data, 540)
    except zlib.error:
        return b""


def _nifti_class(header: bytes) -> Any:
    for order in ("little", "big"):
        size = int.from_bytes(header[:4], order)
        if size == 348 and header[344:347] == b"n+1":
            return nib.Nifti1Image
        if size == 540 and header[4:7] == b"n+2":
            return nib.Nifti2Image
    return None


def _volume_end(header: Any) -> int:
    """Where the data end in the file, by the header alone."""
    shape = [int(n) for n in header.get_data_shape()]
    return int(header.get_data_offset()) + math.prod(shape) * int(header.get_data_dtype().itemsize)


def _check_geometry(image: Any, leniency: Leniency) -> tuple[FileReport, Any]:
    """What the header says, and the affine."""
    header, shape = image.header, image.shape
    warnings = {}
    while len(shape) > 3 and shape[-1] == 1:  # a series of one volume is a volume
        shape = shape[:-1]
        warnings["ONE_VOLUME"] = f"a series of one volume: shape {image.shape}"
    if len(shape) != 3 or min(shape) < 2:
        raise _Bad("NOT_3D", f"shape {image.shape}", "give one 3-D volume per file")
    if image.get_data_dtype().kind not in "iuf":
        raise _Bad("BAD_DTYPE", f"voxels of type {image.get_data_dtype()}", "convert to numbers")
    if int(header["sform_code"]) == 0 and int(header["qform_code"]) == 0:
        if not leniency.assume:
            detail = "sform and qform codes are 0: nobody knows where left is"
            action = "convert again from DICOM, or say that it is RAS: --data.assume / --assume RAS"
            raise _Bad("NO_ORIENTATION", detail, action)
        warnings["NO_ORIENTATION"] = "taken for RAS: sform and qform codes are 0"
    affine = affine_of(image)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-6:
        raise _Bad("SINGULAR_AFFINE", f"affine {affine[:3].tolist()}", "convert again from DICOM")
    _check_forms(header)
    sizes = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    odd = _odd_measures(sizes, sizes * shape)
    report = FileReport(
        warnings=warnings | ({"GEOMETRY": odd} if odd else {}),
        shape=" ".join(str(n) for n in shape),
        zooms=" ".join(f"{size:.4g}" for size in sizes),
        axcodes="".join(nib.aff2axcodes(affine)),
    )
    return report, affine


def affine_of(image: Any) -> Any:
    """The affine (4, 4); without one RAS around the middle, where nibabel says LAS."""
    header = image.header
    if int(header["sform_code"]) or int(header["qform_code"]):
        return image.affine
    sizes = np.asarray(header.get_zooms()[:3], float)
    affine = np.diag([*sizes, 1.0])
    affine[:3, 3] = -sizes * (np.asarray(image.shape[:3]) - 1) / 2
    return affine


def _odd_measures(sizes: Any, extent: Any) -> str:
    """``what is unusual: the measures``, or nothing."""
    odd = {
        "voxels below 0.4 mm": sizes.min() < 0.4,
        "voxels above 4 mm": sizes.max() > 4.001,  # affines are stored in single precision
        "field of view below 100 mm": extent.min() < 100,
        "field of view above 450 mm": extent.max() > 450,
    }
    if not any(odd.values()):
        return ""
    voxels, view = (" x ".join(f"{size:.3g}" for size in sides) for sides in (sizes, extent))
    return f"{' and '.join(k for k in odd if odd[k])}: voxels {voxels} mm, field of view {view} mm"


def _check_forms(header: Any) -> None:
    """Readers take the sform silently when the two disagree; one of them is wrong."""
    if int(header["sform_code"]) == 0 or int(header["qform_code"]) == 0:
        return
    sform, qform = header.get_sform(), header.get_qform()
    axes = nib.aff2axcodes(sform), nib.aff2axcodes(qform)
    apart = float(np.abs(sform[:3, 3] - qform[:3, 3]).max())
    if axes[0] != axes[1] or apart > 1.0:
        detail = f"sform {''.join(axes[0])}, qform {''.join(axes[1])}, origins {apart:.1f} mm apart"
        raise _Bad("FORM_CONFLICT", detail, "find out which is right, and write it to both")


def _check_values(image: Any, leniency: Leniency) -> tuple[Any, dict[str, str]]:
    """The voxels (X, Y, Z), and warnings about them."""
    warnings = {}
    values = np.asarray(image.dataobj)
    while values.ndim > 3:
        values = values[..., 0]
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            first = tuple(int(i) for i in np.argwhere(~finite)[0])
            detail = f"{int((~finite).sum())} voxels are NaN or infinite, the first at {first}"
            if leniency.nan == "error":
                action = "repair or exclude the scan, or take 0 for them: --data.nan / --nan zero"
                raise _Bad("NON_FINITE", detail, action)
            warnings["NON_FINITE"] = f"taken for 0: {detail}"
            values = np.where(finite, values, 0)
    low, high = values.min(), values.max()
    if low == high:
        raise _Bad("CONSTANT", f"every voxel is {low}", _AGAIN)
    if bool(((values == low) | (values == high)).all()):
        raise _Bad("BINARY_LOOKS_LIKE_MASK", f"only {low} and {high}", "exclude the mask")
    return values, warnings


def check_records(
    records: Sequence[ScanRecord],
    store: Path,
    *,
    leniency: Leniency = STRICT,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[ScanRecord], list[Problem], list[Problem]]:
    """Check the files of all used records.

    Threads are enough: unpacking, hashing and the array operations release the interpreter lock.

    Args:
        records: all records; those excluded or bad already are passed through unread.
        store: JSON file, outside the data, that keeps the results.
        leniency: what is repaired instead of refused.
        workers: threads; None means one per core, eight at most.
        progress: called with (files done, all files).

    Returns:
        The records with content hash, shape and problem filled in; the problems; the warnings.
    """
    version = f"{_VERSION} {leniency}"
    known = _load(store, version)
    paths = [record.path for record in records if record.used]
    keys = {path: _key(path) for path in paths}
    todo = [path for path in paths if keys[path] not in known]
    pool = ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1))
    try:
        for count, report in enumerate(pool.map(partial(_check, leniency), todo), 1):
            known[keys[todo[count - 1]]] = report
            if count % 100 == 0:  # a killed check goes on from here
                _save(store, known, version)
            if progress:
                progress(count, len(todo))
    finally:
        pool.shutdown(cancel_futures=True)
        if todo:  # also when it is stopped by Ctrl-C
            _save(store, known, version)
    return _apply(records, {path: known[key] for path, key in keys.items()})


def _check(leniency: Leniency, path: str) -> FileReport:
    return check_file(Path(path), leniency)


def _apply(
    records: Sequence[ScanRecord], reports: dict[str, FileReport]
) -> tuple[list[ScanRecord], list[Problem], list[Problem]]:
    sound = {path: report for path, report in reports.items() if not report.code}
    names = {record.path: record.image_id for record in records}
    copies = same_pictures({path: report.sample for path, report in sound.items()})
    checked: list[ScanRecord] = []
    problems: list[Problem] = []
    warnings: list[Problem] = []
    for record in records:
        report = reports.get(record.path)
        if report is not None:
            twins = [names[path] for path in copies.get(record.path, [])]
            if twins:
                report = replace(
                    report,
                    code="DUPLICATE_CONTENT",
                    detail=f"the same picture as {', '.join(twins)}",
                    action="keep the right one",
                )
            record = replace(
                record,
                sha256=report.sha256,
                content=min([*twins, record.image_id]) if twins else "",
                shape=report.shape,
                zooms=report.zooms,
                axcodes=report.axcodes,
                reach=report.reach,
                stripped=report.stripped,
                problem=report.code,
            )
            who = (record.path, record.subject, record.image_id)
            if report.code:
                problems.append(Problem(report.code, report.detail, report.action, *who))
            for code, detail in report.warnings.items():
                warnings.append(Problem(code, detail, "used as it is", *who))
        checked.append(record)
    return checked, problems, warnings


def _key(path: str) -> str:
    try:
        status = Path(path).stat()
    except OSError:
        return f"{path}|gone"
    # the change time too: a replaced file may have been given the old modification time
    return f"{path}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}"


def _load(store: Path, version: str) -> dict[str, FileReport]:
    try:
        content = json.loads(store.read_text())
        if content["version"] != version:
            return {}
        return {key: FileReport(**report) for key, report in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # missing or damaged: the files are read again


def _save(store: Path, reports: dict[str, FileReport], version: str) -> None:
    files = {key: asdict(report) for key, report in reports.items() if not key.endswith("|gone")}
    write_atomically(store, json.dumps({"version": version, "files": files}).encode())
