"""Scans that ``clinica run t1-linear`` has corrected and registered (a CAPS folder).

``subjects/<sub>/<ses>/t1_linear/<sub>_<ses>_..._T1w.nii.gz``, the whole image and a cropped one
(``desc-Crop``); the cropped one is used. CAPS folders hold no clinical data.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import FolderError, TableError
from .clinical import Clinical
from .ids import canonical_session
from .people import Names
from .reading import Reading
from .tree import bare_record, is_nifti, require_folder, what_is_there

_SCANS = "subjects/sub-*/ses-*/t1_linear/*_T1w.nii*"


def find_caps(root: Path) -> bool:
    """Whether scans lie where ``t1-linear`` puts them."""
    return any(True for _ in root.glob(_SCANS))


def read_caps(root: Path, clinical: Clinical | None, names: Names) -> Reading:
    """All scans of ``t1-linear``.

    Raises:
        FolderError: no such folder, or no scans in it.
        TableError: no diagnoses.
    """
    require_folder(root)
    paths = [path for path in sorted(root.glob(_SCANS)) if is_nifti(path)]
    if not paths:
        raise FolderError(
            "NO_SCANS",
            "no subjects/sub-*/ses-*/t1_linear/*_T1w.nii.gz; what is there: " + what_is_there(root),
            str(root),
            "give the CAPS folder itself, the one with `subjects` in it",
        )
    if clinical is None:
        raise TableError(
            "NO_TABLE",
            "a CAPS folder holds no diagnoses",
            str(root),
            "give a table of `clinica iotools merge-tsv`, the BIDS folder, ADNIMERGE or DXSUM with "
            "--data.diagnosis_csv / --diagnosis-csv",
        )
    records = []
    for path in paths:
        folder = path.parent.parent  # subjects/<sub>/<ses>/t1_linear/<file>
        record = bare_record(
            path,
            names.person(folder.parent.name),
            f"{folder.parent.name}_{folder.name}" + ("" if "_desc-Crop" in path.name else "_whole"),
            "caps",
        )
        session = canonical_session(folder.name) or folder.name.removeprefix("ses-")
        records.append(replace(record, session=session, description="T1w"))
    return Reading("caps", records, [], clinical)
