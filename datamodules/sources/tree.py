"""Files below a folder, without what is never data."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ..errors import FolderError
from ..records import ScanRecord

TRUTH_MARKER = "synthetic_truth.json"  # names a folder with a synthetic cohort's truth: not data
_SUFFIX = re.compile(r"\.nii(\.gz)?$", re.IGNORECASE)


def is_nifti(path: Path) -> bool:
    """Whether the name is that of a NIfTI file."""
    return bool(_SUFFIX.search(path.name))


def stem(path: Path) -> str:
    """File name without ``.nii`` or ``.nii.gz``."""
    return _SUFFIX.sub("", path.name)


def walk(root: Path) -> Iterator[Path]:
    """All files below ``root`` in a fixed order; links are followed once."""
    visited: set[str] = set()  # links may lead in circles
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited or TRUTH_MARKER in files:
            folders.clear()
            continue
        visited.add(real)
        folders.sort()
        # names with a leading dot: macOS resource forks and unfinished copies
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def require_folder(root: Path) -> None:
    """Raise FolderError unless there is such a folder."""
    if not root.is_dir():
        raise FolderError(
            "NO_FOLDER",
            "no such folder" if not root.exists() else "a file, not a folder",
            str(root),
            "give the folder that holds the download; `python -m datamodules synth DIR` makes one",
        )


def what_is_there(root: Path) -> str:
    """The kinds of files below a folder and the names in it, for messages."""
    kinds: Counter[str] = Counter()
    for path in walk(root):
        double = path.name.lower().endswith(".nii.gz")
        kinds[".nii.gz" if double else path.suffix.lower() or path.name] += 1
    files = ", ".join(f"{n} x {kind}" for kind, n in kinds.most_common(5)) or "no files"
    names = sorted(path.name for path in root.iterdir())
    dots = ", ..." if len(names) > 5 else ""
    return f"{files}; in the folder itself: {', '.join(names[:5]) or 'nothing'}{dots}"


def what_to_do(seen: str) -> str:
    """The next step for a folder without NIfTI files, by what ``what_is_there`` says."""
    if ".dcm" in seen:
        return "convert them: `python -m datamodules prepare ROOT OUT` runs dcm2niix"
    if ".mgz" in seen:
        return "convert the FreeSurfer volumes first: mri_convert IN.mgz OUT.nii.gz"
    return "unpack the download there, or give the folder that holds it"


def bare_record(path: Path, subject: str, image_id: str, layout: str) -> ScanRecord:
    """A record that knows the file only."""
    try:
        status = path.stat()
        size, time = status.st_size, status.st_mtime_ns
    except OSError:  # a dead link; the check says so
        size, time = 0, 0
    return ScanRecord(
        subject=subject,
        image_id=image_id,
        path=str(path),
        layout=layout,
        registered="yes" if layout == "caps" else "" if layout == "csv" else "no",
        site=subject[:3] if subject[3:6] == "_S_" else "",
        bytes=size,
        mtime_ns=time,
    )
