"""Where scans come from: a portal download, Clinica's BIDS or CAPS folders, or a plain table.

Each source gives the same records; what a layout does not know stays empty.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import FolderError
from ..tables import header_of
from .bids import find_bids, read_bids
from .caps import find_caps, read_caps
from .diagnoses import find_diagnoses
from .ida import discover, find_ida, read_ida
from .oasis import find_oasis, read_oasis
from .people import Names
from .plain import REQUIRED as PLAIN_COLUMNS
from .plain import plain_folders, read_plain
from .reading import LAYOUTS, Layout, Reading
from .tree import require_folder, what_is_there, what_to_do

__all__ = ["LAYOUTS", "Layout", "Names", "Reading", "data_folders", "read_source"]


def read_source(
    root: Path,
    layout: Layout | None = None,
    *,
    collection_csv: Path | None = None,
    diagnosis_csv: Path | None = None,
    names: Names = Names(),  # noqa: B008 (frozen)
) -> Reading:
    """Find the scans below ``root`` and what is said about them.

    Args:
        root: folder of the data, or a table of scans.
        layout: how they lie there; None: found out.
        collection_csv: the portal's collection table (``ida``).
        diagnosis_csv: ADNIMERGE, DXSUM, a table of ``clinica iotools merge-tsv``, a BIDS folder
            with the tables that Clinica writes, the tables of AIBL or OASIS-3, or a table with one
            row for each person. None: looked for in ``root``, but for the last.
        names: how names of people are read.

    Raises:
        FolderError: nothing there, or no layout or several that fit.
        TableError: a table that is missing, ambiguous or not understood.
    """
    found = layout or detect_layout(root)
    if found == "csv":
        clinical = find_diagnoses(None, diagnosis_csv, names)  # its own labels are there for use
        return read_plain(_plain_table(root), clinical, names)
    if found == "ida":
        scans = discover(root)  # first: a missing folder says more than a missing table
        return read_ida(root, scans, collection_csv, find_diagnoses(root, diagnosis_csv, names))
    if found == "bids":
        # a column of people says more than the sessions' own, if one is asked for
        where = None if names.label_column else root
        return read_bids(root, find_diagnoses(where, diagnosis_csv, names), names)
    if found == "oasis":
        return read_oasis(root, find_diagnoses(root, diagnosis_csv, names))
    return read_caps(root, find_diagnoses(root, diagnosis_csv, names), names)


def detect_layout(root: Path) -> Layout:
    """Find out how the scans below ``root`` lie there.

    Raises:
        FolderError: none of the layouts fits, or more than one does.
    """
    if root.is_file():
        return "csv"
    require_folder(root)
    fits: dict[Layout, bool] = {
        "caps": find_caps(root),
        "bids": find_bids(root),
        "csv": len(_plain_tables(root)) == 1,
        "ida": find_ida(root),
        "oasis": find_oasis(root),
    }
    if fits["csv"] and fits["caps"]:  # as `prepare` writes: the table knows more of the same scans
        return "csv"
    found = [layout for layout, fit in fits.items() if fit]
    if len(found) == 1:
        return found[0]
    if found:
        raise FolderError(
            "SEVERAL_LAYOUTS",
            f"the folder can be read as {' and as '.join(found)}",
            str(root),
            "say which with --data.layout / --layout, or give the folder of one of them",
        )
    seen = what_is_there(root)
    raise FolderError(
        "NO_SCANS",
        "no .nii or .nii.gz file below a folder named like 123_S_0456 (ida), at "
        "sub-*/ses-*/anat/*_T1w (bids), at subjects/sub-*/ses-*/t1_linear (caps) or below a folder "
        "named like OAS30001_MR_d0129 or OAS1_0001_MR1 (oasis), and no table "
        f"with the columns {', '.join(PLAIN_COLUMNS)} (csv); what is there: {seen}",
        str(root),
        what_to_do(seen),
    )


def data_folders(root: Path) -> list[Path]:
    """Folders that must not be written to."""
    return plain_folders(root) if root.is_file() else [root]


def _plain_tables(root: Path) -> list[Path]:
    tables = sorted(p for p in root.glob("*") if p.suffix.lower() in (".csv", ".tsv"))
    return [path for path in tables if set(PLAIN_COLUMNS) <= header_of(path)]


def _plain_table(root: Path) -> Path:
    if root.is_file():
        return root
    require_folder(root)
    tables = _plain_tables(root)
    if len(tables) == 1:
        return tables[0]
    names = ", ".join(path.name for path in tables) or what_is_there(root)
    raise FolderError(
        "NO_TABLE" if not tables else "SEVERAL_TABLES",
        f"{len(tables)} tables with the columns {', '.join(PLAIN_COLUMNS)}: {names}",
        str(root),
        "give the table itself instead of its folder",
    )
