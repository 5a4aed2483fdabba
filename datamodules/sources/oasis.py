"""Scans of OASIS-1 and OASIS-3 as they are downloaded: one folder for each session of a person.

OASIS-3: ``OAS30001_MR_d0129/anat2/..._T1w.nii.gz`` with a JSON file beside it; diagnoses are in the
study's forms (``uds``). OASIS-1: ``OAS1_0001_MR1/PROCESSED/MPRAGE/SUBJ_111/*.img`` (the average of
the session's images in the head's own space), ANALYZE pairs, which ``prepare`` converts, and one
table, ``oasis_cross-sectional.csv``. Its diagnosis is the CDR: 0 is normal, above 0 (0.5 is very
mild) AD, and people who were not rated, most of them young, have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..cells import number_in, quantity_in, sex_in
from ..errors import FolderError, TableError
from ..records import ScanRecord
from ..tables import header_of, read_table
from .clinical import Clinical
from .ids import canonical_subject, session_in_name
from .reading import Reading
from .scanner import header_of_scan, scanner_name
from .tree import bare_record, is_nifti, require_folder, stem, walk, what_is_there

_SESSION = re.compile(r"OAS(?:1_\d{4}_MR\d+|3\d{4}_MR_d\d{4,5})", re.IGNORECASE)
_TABLE = {"id", "m/f", "age", "cdr"}


def find_oasis(root: Path) -> bool:
    """Whether there are scans in folders named after a session of OASIS-1 or OASIS-3."""
    return any(True for _ in _scans(root))


def _scans(root: Path) -> Iterator[tuple[Path, str]]:
    """Files and their sessions."""
    for path in walk(root):
        names = (root.name, *path.relative_to(root).parts[:-1])
        name = next((part for part in names if _SESSION.fullmatch(part)), "")
        third = is_nifti(path) and stem(path).endswith("_T1w")
        if name and (third if name[3] == "3" else _is_averaged(path)):
            yield path, name.upper().replace("_MR_D", "_MR_d")


def _is_averaged(path: Path) -> bool:
    return path.suffix == ".img" and path.parent.name == "SUBJ_111"


def read_oasis(root: Path, clinical: Clinical | None) -> Reading:
    """All T1-weighted scans, with the table of OASIS-1 where it is one of that study.

    Raises:
        FolderError: no such folder, or no scans in it.
        TableError: there are no diagnoses.
    """
    require_folder(root)
    scans = sorted(_scans(root))
    if not scans:
        raise FolderError(
            "NO_SCANS",
            "no OAS3*_MR_d*/anat*/*_T1w.nii.gz and no OAS1_*_MR*/PROCESSED/MPRAGE/SUBJ_111/*.img; "
            f"what is there: {what_is_there(root)}",
            str(root),
            "unpack the download there",
        )
    first = any(name.startswith("OAS1") for _, name in scans)
    if not first and clinical is None:
        raise TableError(
            "NO_TABLE",
            "no diagnoses of OASIS-3",
            str(root),
            "give the folder OASIS3_data_files, or OASIS3_UDSd1_diagnoses.csv, with "
            "--data.diagnosis_csv / --diagnosis-csv",
        )
    records = [_record(path, name, root) for path, name in scans]
    if not first or clinical is not None:
        return Reading("oasis", records, [], clinical)
    table = _table_of_first(root)
    rows = {row["id"].upper(): row for row in read_table(table, tuple(_TABLE)).rows}
    described = [
        _described(record, rows.get(name), table) for record, (_, name) in zip(records, scans)
    ]
    return Reading("oasis", described, [], None, f"{table.name}:CDR, above 0 is AD", (table,))


def _record(path: Path, name: str, root: Path) -> ScanRecord:
    header = {key: str(value) for key, value in header_of_scan(path, root).items()}
    field = quantity_in(header.get("MagneticFieldStrength", ""), "field_strength")
    return replace(
        bare_record(path, canonical_subject(name), stem(path).removesuffix("_T1w"), "oasis"),
        session=session_in_name(name),
        description="T1w",
        field_strength=field,
        scanner=scanner_name(
            header.get("Manufacturer", ""), header.get("ManufacturersModelName", "")
        ),
    )


def _table_of_first(root: Path) -> Path:
    tables = [path for path in sorted(root.glob("*.csv")) if header_of(path) >= _TABLE]
    if len(tables) != 1:
        raise TableError(
            "SEVERAL_TABLES" if tables else "NO_TABLE",
            f"{len(tables)} tables with ID, M/F, Age and CDR directly in the folder",
            str(root),
            "put the one table of OASIS-1 there, oasis_cross-sectional.csv (an Excel file: save it "
            "as CSV)",
        )
    return tables[0]


def _described(record: ScanRecord, row: dict[str, str] | None, table: Path) -> ScanRecord:
    record = replace(record, image_id=f"{record.subject}_{record.session}", field_strength=1.5)
    if row is None:
        return replace(record, reason="missing")
    cdr = number_in(row["cdr"])
    return replace(
        record,
        dx_bl="" if cdr is None else "CN" if cdr == 0 else "AD",
        dx_source=f"{table.name}:CDR={row['cdr']}",
        reason="not_rated" if cdr is None else "",
        age=quantity_in(row["age"], "age"),
        sex=sex_in(row["m/f"]),
        mmse=quantity_in(row.get("mmse", ""), "mmse"),
        scanner="Siemens Vision",
    )
