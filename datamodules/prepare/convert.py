"""Scans that are no NIfTI files yet: DICOM folders, and the ANALYZE pairs of OASIS-1.

DICOM is converted by dcm2niix, which its package on PyPI brings along. The series are listed first,
and the T1-weighted ones alone are converted, into ``OUT/converted``. Of the headers nothing is kept
but what a study needs: patient ID, sex, age, day, series, scanner; no name, no birthday.
"""

# mypy: allow-untyped-calls
# (most of nibabel carries no annotations)
from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel as nib
import numpy as np

from ..atomic import write_atomically
from ..cells import sex_in
from ..errors import DataError
from ..records import ScanRecord
from ..series import is_t1
from ..sources import Names
from ..sources.scanner import scanner_name
from ..sources.tree import bare_record, walk

FOLDER = "converted"
_LISTED = re.compile(r"^\t(\d+)\t(.*)$", re.MULTILINE)  # number and name of a series
_PARTS = {"P", "PHASE", "REAL", "R", "IMAGINARY", "I"}  # of a complex image


def has_dicom(root: Path) -> bool:
    """Whether there is a DICOM file below a folder, whatever its name."""
    return root.is_dir() and any(_is_dicom(path) for path in walk(root))


def _is_dicom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def convert_dicom(
    root: Path, out: Path, names: Names, progress: Callable[[int, int], None] | None = None
) -> tuple[list[ScanRecord], Counter[str]]:
    """Convert the T1-weighted series below ``root``, one of its folders after the other.

    A folder that has not changed since it was converted is left as it is.

    Returns:
        A record for each of them, and how many series of each description are of another kind.

    Raises:
        DataError: dcm2niix is not there or fails.
    """
    folders = _with_dicom(root)
    series: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for count, folder in enumerate(folders, start=1):
        key = sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        index = out / FOLDER / f"{key}.json"
        known = _known(folder, index) or _convert(folder, index)
        series += [{**one, "patient": one["patient"] or folder.name} for one in known["series"]]
        left_out.update(known["left_out"])
        if progress:
            progress(count, len(folders))
    return [_record(one, out, names) for one in series], left_out


def _with_dicom(root: Path) -> list[Path]:
    """The folders directly in ``root`` with DICOM files, or in the only one that has any."""
    if any(path.is_file() and _is_dicom(path) for path in root.iterdir()):
        return [root]
    inside = sorted(path for path in root.iterdir() if has_dicom(path))
    return _with_dicom(inside[0]) if len(inside) == 1 else inside


def _known(folder: Path, index: Path) -> dict[str, Any] | None:
    """What was converted before from the same files."""
    try:
        said: dict[str, Any] = json.loads(index.read_text())
    except (OSError, ValueError):
        return None
    there = all(index.with_name(one["file"]).is_file() for one in said["series"])
    return said if said["state"] == _state(folder) and there else None


def _state(folder: Path) -> str:
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in walk(folder)]
    return sha256(repr(files).encode()).hexdigest()


def _convert(folder: Path, index: Path) -> dict[str, Any]:
    """Convert the T1-weighted series of one folder; say which, and what else there was."""
    index.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    with TemporaryDirectory(dir=index.parent, prefix=".") as there:
        listed = [
            (number, name.removeprefix(f"{there}/"))
            for number, name in _LISTED.findall(_dcm2niix(folder, Path(there), "%d", "-n", "-1"))
        ]
        wanted = list(dict.fromkeys(number for number, name in listed if is_t1(name)))
        for start in range(0, len(wanted), 16):  # so many series it takes in one call
            chosen = [text for number in wanted[start : start + 16] for text in ("-n", number)]
            _dcm2niix(folder, Path(there), "%j", *chosen)
        for path in sorted(Path(there).glob("*.nii")):
            said = json.loads(path.with_suffix(".json").read_text())
            if not _PARTS & {str(word).upper() for word in said.get("ImageType", ())}:
                found.append(_described(said, path.stem))
                path.replace(index.with_name(found[-1]["file"]))
    others = Counter(name for number, name in listed if number not in wanted)
    content = {"state": _state(folder), "series": found, "left_out": others}
    write_atomically(index, (json.dumps(content, indent=1) + "\n").encode())
    return content


def _described(said: dict[str, Any], name: str) -> dict[str, Any]:
    """What is kept of a header."""
    day = str(said.get("AcquisitionDateTime", ""))[:10]
    born = str(said.get("PatientBirthDate", ""))
    days = (np.datetime64(day) - np.datetime64(born)).astype(int) if day and born else None
    patient = str(said.get("PatientID", "")).strip()
    words = re.sub(r"[^0-9A-Za-z]+", "-", f"{patient} {day}")
    return {
        "file": f"{words}_{sha256(name.encode()).hexdigest()[:8]}.nii",
        "patient": patient,
        "sex": sex_in(str(said.get("PatientSex", ""))),
        "age": None if days is None else round(float(days) / 365.25, 1),
        "day": day,
        "description": str(said.get("SeriesDescription", "") or said.get("ProtocolName", "")),
        "field_strength": said.get("MagneticFieldStrength"),
        "scanner": scanner_name(
            str(said.get("Manufacturer", "")), str(said.get("ManufacturersModelName", ""))
        ),
    }


def _record(one: dict[str, Any], out: Path, names: Names) -> ScanRecord:
    who = one["patient"]
    path = out / FOLDER / one["file"]
    return replace(
        bare_record(path, names.person(who), path.stem, "csv"),
        session=names.session(who),
        acq_date=one["day"],
        description=one["description"],
        sex=one["sex"],
        age=one["age"],
        field_strength=one["field_strength"],
        scanner=one["scanner"],
    )


def _dcm2niix(folder: Path, there: Path, name: str, *chosen: str) -> str:
    """Run dcm2niix on a folder; return what it says."""
    try:
        tool = import_module("dcm2niix").bin
    except ImportError:
        raise DataError(
            "MISSING_TOOL",
            "DICOM files, and dcm2niix is not installed",
            str(folder),
            "pip install '.[prepare]'",
        ) from None
    command = [tool, "-b", "y", "-ba", "n", "-c", "", "-z", "n", "-d", "9", "-w", "2", "-f", name]
    done = subprocess.run(
        [*command, *chosen, "-o", str(there), str(folder)], capture_output=True, text=True
    )
    # 2: no DICOM files; 8: some of the files could not be converted
    if done.returncode not in (0, 2, 8):
        raise DataError(
            "CONVERSION",
            f"dcm2niix ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}",
            str(folder),
            "look at the folder; `dcm2niix -h` says what it can read",
        )
    return done.stdout


def as_nifti(record: ScanRecord, out: Path) -> ScanRecord:
    """A record of a NIfTI file: an image of OASIS-1 is converted, others are what they are.

    The images in ``SUBJ_111`` all lie alike, which their headers cannot say: the first axis points
    to the front, the second up, the third to the left.
    """
    source = Path(record.path)
    if source.suffix != ".img":
        return record
    path = out / FOLDER / f"{record.image_id}.nii"
    if not path.is_file() or path.stat().st_mtime_ns < source.stat().st_mtime_ns:
        image: Any = nib.load(source)
        values: Any = np.asarray(image.dataobj)
        values = values.reshape(values.shape[:3])
        front, up, left = (float(size) for size in image.header.get_zooms()[:3])
        n = values.shape
        affine = np.diag([0.0, 0.0, 0.0, 1.0])
        affine[[1, 2, 0], [0, 1, 2]] = front, up, -left
        affine[:3, 3] = left * n[2] / 2, -front * n[0] / 2, -up * n[1] / 2
        turned = nib.Nifti1Image(values.astype(values.dtype.newbyteorder("=")), affine)
        turned.header.set_xyzt_units("mm")
        turned.set_qform(affine, 1)
        write_atomically(path, turned.to_bytes())
    status = path.stat()
    return replace(record, path=str(path), bytes=status.st_size, mtime_ns=status.st_mtime_ns)
