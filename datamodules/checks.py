"""Reading every file to its end before the first training step.

MONAI and nibabel name no path when a file is cut off, and take a flipped bit in a gzip stream for
data, because they never read as far as the checksum. Here each file is read whole, once; results
are kept outside the data, keyed by path, size and times, so that the next start is quick.
"""

# mypy: allow-untyped-calls
# (most of nibabel carries no annotations)
from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from .atomic import write_atomically
from .content import picture_hash, same_pictures, sample_voxels
from .errors import Problem
from .likeness import coarse
from .nifti import AGAIN, STRICT, BadFile, Leniency, check_geometry, read_image
from .profiles import is_stripped
from .records import ScanRecord
from .voxels import head_box, missing_part, read_voxels

_VERSION = 9  # raise it when a check changes


@dataclass(frozen=True)
class FileReport:
    """What is known of one file.

    Attributes:
        code: kind of problem; empty for a good file.
        detail: what was found.
        action: what the user can do about it.
        warnings: what is odd and does no harm: detail by code.
        sha256: of the file as it lies on disk.
        shape: voxels along each axis of the file, separated by spaces.
        zooms: size of a voxel along the same axes, in mm.
        axcodes: where the axes point to, e.g. ``RAS``.
        reach: sides in mm of the box that a crop should hold; see ``ScanRecord``.
        middle_mm: where the middle of the volume lies, in mm, ``x y z``.
        sample: voxels of a coarse lattice as text, by which copies of a picture are found.
        stripped: ``yes``, ``no`` or empty; see ``ScanRecord``.
        coarse: coarse image of the head, by which it is compared with others.
        planes: three planes to look at; both as `datamodules.likeness` writes them.
    """

    code: str = ""
    detail: str = ""
    action: str = ""
    warnings: Mapping[str, str] = field(default_factory=dict)
    sha256: str = ""
    shape: str = ""
    zooms: str = ""
    axcodes: str = ""
    reach: str = ""
    middle_mm: str = ""
    sample: str = ""
    stripped: str = ""
    coarse: str = ""
    planes: str = ""


def check_file(path: Path, leniency: Leniency = STRICT) -> FileReport:
    """Read one file to its end and say what is wrong with it, or describe it.

    Never raises: whatever a file makes of its readers is this file's problem, not the others'.
    """
    try:
        return _describe(path, leniency)
    except BadFile as bad:
        return FileReport(bad.code, bad.detail, bad.action)
    except FileNotFoundError:
        return FileReport("NOT_FOUND", f"no file at {path}", f"correct the path, or {AGAIN}")
    except OSError as error:
        return FileReport("UNREADABLE", f"{error.strerror or error}", "check rights and disk")
    except Exception as error:
        return FileReport("UNREADABLE", f"{type(error).__name__}: {error}", AGAIN)


def _describe(path: Path, leniency: Leniency) -> FileReport:
    image, sha256 = read_image(path)
    affine, warnings = check_geometry(image, leniency)
    values, more = read_voxels(image, leniency)
    order = nib.io_orientation(affine)
    turned = nib.orientations.apply_orientation(values, order)
    sizes = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    sizes_ras = sizes[order[:, 0].argsort()]
    stripped = is_stripped(values, abs(float(np.linalg.det(affine[:3, :3]))))
    missing = missing_part(turned, sizes_ras, stripped == "yes")
    if missing:
        raise BadFile("INCOMPLETE", missing, AGAIN)
    head, planes = coarse(turned, sizes_ras, stripped == "yes")
    return FileReport(
        warnings={**warnings, **more},
        sha256=sha256,
        shape=" ".join(str(n) for n in values.shape),
        zooms=" ".join(f"{size:.4g}" for size in sizes),
        axcodes="".join(nib.aff2axcodes(affine)),
        reach=_reach(turned, sizes_ras, stripped == "yes"),
        middle_mm=" ".join(f"{place:.4g}" for place in _middle(affine, values.shape)),
        sample=sample_voxels(turned),
        stripped=stripped,
        coarse=head,
        planes=planes,
    )


def _middle(affine: Any, shape: tuple[int, ...]) -> list[float]:
    """Of a volume, in mm; 0 is not -0."""
    places = affine[:3, :3] @ ((np.array(shape) - 1) / 2) + affine[:3, 3]
    return [float(place) for place in places.round(1) + 0.0]


def _reach(values: Any, sizes_mm: Any, stripped: bool) -> str:
    """Sides in mm of the box that a crop should hold.

    For a brain the box around the middle of the volume (X, Y, Z), where it is cropped, with all
    but the background, which is 0. For a head the box around the head itself.
    """
    if not stripped:
        return " ".join(f"{side:.0f}" for side in head_box(values, sizes_mm)[1])
    tissue = values > 0
    reach = []
    for axis, size in enumerate(sizes_mm):
        rest = tuple(other for other in range(3) if other != axis)
        places = np.flatnonzero(tissue.any(axis=rest)) - (tissue.shape[axis] - 1) / 2
        reach.append(f"{(2 * np.abs(places).max() + 1) * size:.0f}")
    return " ".join(reach)


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


def kept_reports(store: Path, leniency: Leniency, paths: Sequence[str]) -> dict[str, FileReport]:
    """What is known of files that were checked and have not changed, by path."""
    known = _load(store, f"{_VERSION} {leniency}")
    return {path: known[key] for path in paths if (key := _key(path)) in known}


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
                picture=picture_hash(report.sample),
                shape=report.shape,
                zooms=report.zooms,
                axcodes=report.axcodes,
                reach=report.reach,
                middle_mm=report.middle_mm,
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
