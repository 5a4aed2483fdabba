"""One scan on its way: checked, bias corrected, stripped if asked for, brought to MNI space."""

# mypy: allow-untyped-calls
# (most of nibabel carries no annotations)
from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from ..atomic import write_atomically
from ..checks import check_file
from ..nifti import STRICT, BadFile, Leniency, check_geometry, read_image
from ..records import ScanRecord
from ..synth.grids import Array
from ..voxels import read_voxels
from .bias import bias_field
from .itk import resampled, simple_itk, to_itk
from .quality import draw_quality, registered_picture
from .register import Registration, register
from .strip import brain_mask
from .template import SPACE, template

VERSION = 1  # raise it when the same scan becomes another file


@dataclass(frozen=True)
class Settings:
    """How scans are prepared.

    Attributes:
        resolution_mm: voxel size of what is written.
        strip: tool that takes everything but the brain away, or ``none``.
        leniency: what is repaired instead of refused.
    """

    resolution_mm: float = 1.0
    strip: str = "none"
    leniency: Leniency = STRICT


@dataclass(frozen=True)
class Prepared:
    """What became of a scan.

    Attributes:
        record: the scan.
        path: of the prepared file, relative to the output folder.
        measures: numbers of its quality, as text, by name.
        code: kind of problem; empty for a good one.
        detail: what was found.
        action: what to do about it.
        again: whether it was there already.
    """

    record: ScanRecord
    path: Path
    measures: dict[str, str]
    code: str = ""
    detail: str = ""
    action: str = ""
    again: bool = False


MEASURES = ("correlation", "apart_mm", "scales", "bias_field", "brain_l")


def prepare_scan(out: Path, settings: Settings, record: ScanRecord, path: Path) -> Prepared:
    """Prepare one scan; never raises for it.

    Args:
        out: output folder.
        settings: how.
        record: the scan.
        path: of the file to write, relative to ``out``; ``.json`` and ``_quality.png`` of the same
            name are written beside it.
    """
    prepared = Prepared(record, path, dict.fromkeys(MEASURES, ""))
    try:
        report = check_file(Path(record.path), settings.leniency)
        if report.code:
            raise BadFile(report.code, report.detail, report.action)
        known = _known(out / path, report.sha256, settings)
        if known is not None:
            return replace(prepared, measures=known, again=True)
        return _prepare(out, settings, prepared, report.sha256, report.stripped == "yes")
    except BadFile as bad:
        return _refused(prepared, bad)
    except (OSError, ValueError, RuntimeError) as error:
        detail = f"{type(error).__name__}: {error}"
        return replace(prepared, code="FAILED", detail=detail, action="look at the scan")


def _refused(prepared: Prepared, bad: BadFile) -> Prepared:
    return replace(prepared, code=bad.code, detail=bad.detail, action=bad.action)


def _known(path: Path, sha256: str, settings: Settings) -> dict[str, str] | None:
    """The measures of a file that was prepared from the same scan in the same way."""
    try:
        said = json.loads(_beside(path, ".json").read_text())
        same = said["key"] == _key(sha256, settings)
        written = hashlib.sha256(path.read_bytes()).hexdigest() == said["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return said["measures"] if same and written else None


def _key(sha256: str, settings: Settings) -> dict[str, Any]:
    return {"source_sha256": sha256, "version": VERSION, **asdict(settings)}


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name.removesuffix(".nii.gz") + ending)


def _prepare(
    out: Path, settings: Settings, prepared: Prepared, sha256: str, stripped: bool
) -> Prepared:
    image, _ = read_image(Path(prepared.record.path))
    affine, warnings = check_geometry(image, settings.leniency)
    values, more = read_voxels(image, settings.leniency)
    turned = nib.as_closest_canonical(nib.Nifti1Image(values, affine))
    scan, affine = np.asarray(turned.dataobj), turned.affine
    field = bias_field(scan, affine)
    corrected = np.asarray(scan / field, np.float32)
    measures = dict(prepared.measures)
    low, high = np.percentile(field[scan > 0], [1, 99])
    measures["bias_field"] = f"{low:.2f} to {high:.2f}"
    if settings.strip != "none" and not stripped:
        brain = brain_mask(settings.strip, corrected, affine)
        corrected *= brain
        measures["brain_l"] = f"{brain.sum() * abs(np.linalg.det(affine[:3, :3])) * 1e-6:.2f}"
        stripped = True
    found = register(corrected, affine, stripped)
    measures |= {
        "correlation": f"{found.correlation:.3f}",
        "apart_mm": f"{found.apart_mm:.2f}",
        "scales": " ".join(f"{scale:.2f}" for scale in found.scales),
    }
    grid = template(settings.resolution_mm).grid
    there = np.maximum(
        resampled(to_itk(corrected, affine), grid, found.to_scan, cubic=not stripped), 0
    )
    path, record = prepared.path, prepared.record
    title = f"{record.subject} {record.session} {record.image_id}   " + ", ".join(
        f"{name.replace('_', ' ')} {text}" for name, text in measures.items() if text
    )
    draw_quality(
        _beside(out / path, "_quality.png"),
        title,
        scan,
        field,
        affine,
        registered_picture(there, grid),
    )
    try:
        found.refuse_failure()
    except BadFile as bad:
        return _refused(replace(prepared, measures=measures), bad)
    data = _nifti(there, grid.affine)
    write_atomically(out / path, data)
    digest = hashlib.sha256(data).hexdigest()
    said = _provenance(record, found, settings, {**warnings, **more})
    said |= {"key": _key(sha256, settings), "measures": measures, "sha256": digest}
    write_atomically(_beside(out / path, ".json"), (json.dumps(said, indent=1) + "\n").encode())
    return replace(prepared, measures=measures)


def _nifti(values: Array, affine: Array) -> bytes:
    """A gzipped NIfTI file of 16-bit numbers with a slope; what is 0 stays 0."""
    image = nib.Nifti1Image(values, affine)
    image.header.set_xyzt_units("mm")
    image.header.set_data_dtype(np.int16)
    image.header.set_slope_inter(max(float(values.max()), 1e-6) / np.iinfo(np.int16).max, 0)
    image.set_sform(affine, 4)  # MNI
    image.set_qform(affine, 4)
    return gzip.compress(image.to_bytes(), 5, mtime=0)


def _provenance(
    record: ScanRecord, found: Registration, settings: Settings, warnings: dict[str, str]
) -> dict[str, Any]:
    """What was done to a scan, and with what."""
    return {
        "subject": record.subject,
        "session": record.session,
        "image_id": record.image_id,
        "source": Path(record.path).name,
        "steps": [
            "bias field: N4 (SimpleITK)",
            *([f"skull strip: {settings.strip}"] if settings.strip != "none" else []),
            f"affine registration to {SPACE} of nilearn: mutual information (SimpleITK)",
            f"resampled to {settings.resolution_mm:g} mm",
        ],
        "template_to_scan_mm": found.to_scan.round(6).tolist(),
        "warnings": warnings,
        "versions": {
            "SimpleITK": simple_itk().Version_VersionString(),
            **{name: version(name) for name in ("nilearn", "nibabel", "numpy", "scipy")},
        },
    }
