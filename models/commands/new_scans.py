"""Scans that nobody has labelled: a file, a folder, or a table of them."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nibabel as nib

from datamodules.cells import Cells
from datamodules.nifti import is_map
from datamodules.sources.people import Names
from datamodules.sources.tree import is_nifti, stem, walk
from datamodules.tables import MISSING, read_table
from models.errors import UseError

# the portal and BIDS write more around a person's name
_PERSON = re.compile(r"(?:^|_)(sub-[0-9A-Za-z]+|\d{3}_S_\d{4,5})(?=_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class NewScan:
    """One scan to be looked at.

    Attributes:
        path: of the file.
        name: of the scan in tables and pictures; no two have the same.
        subject: the person; the name of the file without a session where no table says it.
        age: years; None: not known.
        sex: F, M or empty.
        field_strength: tesla; None: not known.
        unread: cells of the table that say something which was not understood, by column.
    """

    path: Path
    name: str
    subject: str
    age: float | None = None
    sex: str = ""
    field_strength: float | None = None
    unread: Mapping[str, str] = field(default_factory=dict)


def find_scans(given: Path) -> list[NewScan]:
    """The scans of a NIfTI file, of a folder with such files at any depth, or of a table.

    A table has a column ``path`` (relative to it), and may have ``subject``, ``image_id``, ``age``,
    ``sex`` and ``field_strength``.

    Raises:
        UseError: nothing is there.
        TableError: the table cannot be understood.
    """
    if given.is_dir():
        files = [path for path in walk(given) if is_nifti(path)]
        scans = [path for path in files if not _is_map(path)]
        if len(scans) < len(files):
            print(f"{len(files) - len(scans)} files below {given} are maps and no scans: left out")
        if not scans:
            raise UseError(f"There is no .nii or .nii.gz file with a scan below {given}.")
        names = _told_apart([(*path.relative_to(given).parts[:-1], stem(path)) for path in scans])
        return _unique([NewScan(p, name, _person(p)) for p, name in zip(scans, names)])
    if not given.is_file():
        raise UseError(f"There is no file or folder {given}; give a scan, a folder or a table.")
    if given.suffix.lower() in (".csv", ".tsv", ".txt"):
        return _unique(_from_table(given))
    return [NewScan(given, stem(given), _person(given))]


def _is_map(path: Path) -> bool:
    """Whether it is a map, of an earlier run or of any other tool; what is damaged is none."""
    try:
        return is_map(nib.load(path).header)
    except Exception:  # whatever a damaged file makes of its reader; the check names it
        return False


def _told_apart(paths: Sequence[Sequence[str]]) -> list[str]:
    """Names of files, with as many of their folders as tell those of one name apart."""
    taken = [1] * len(paths)
    while True:
        names = ["_".join(path[-count:]) for path, count in zip(paths, taken)]
        often = Counter(names)
        more = [n for n, name in enumerate(names) if often[name] > 1 and taken[n] < len(paths[n])]
        if not more:
            return names
        for n in more:
            taken[n] += 1


def _person(path: Path) -> str:
    """The person whom a file is named after."""
    found = _PERSON.search(stem(path))
    return Names().person(found[1] if found else stem(path))


def _from_table(table: Path) -> list[NewScan]:
    read = read_table(table, ("path",))
    cells = Cells(table.name, read.rows, read.lines, ("age", "field_strength"))
    found = []
    for row in read.rows:
        path = (table.parent / row["path"]).absolute()
        known = {key: "" if value.lower() in MISSING else value for key, value in row.items()}
        found.append(
            NewScan(
                path,
                known.get("imageid") or stem(path),
                Names().person(known["subject"]) if known.get("subject") else _person(path),
                cells.number(row, "age"),
                cells.sex(row),
                cells.number(row, "field_strength"),
                cells.unread(row),
            )
        )
    return found


def _unique(scans: list[NewScan]) -> list[NewScan]:
    """Names that occur twice get a number."""
    seen: dict[str, int] = {}
    found = []
    for scan in scans:
        seen[scan.name] = seen.get(scan.name, 0) + 1
        number = seen[scan.name]
        name = scan.name if number == 1 else f"{scan.name}_{number}"
        found.append(NewScan(**{**scan.__dict__, "name": name}))
    return found
