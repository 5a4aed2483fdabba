"""Prepare all scans of a folder: which they are, where they go, and what came of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from ..atomic import write_atomically
from ..errors import DataError, FolderError, Problem
from ..joining import COLUMNS, write_joined
from ..records import ScanRecord
from ..series import choose_series
from ..sources import Layout, Names, read_source
from ..sources.ids import PTID
from ..sources.tree import bare_record, is_nifti, stem, walk
from ..tables import table_bytes
from .convert import as_nifti, convert_dicom, has_dicom
from .itk import simple_itk
from .one_scan import MEASURES, Prepared, Settings, prepare_scan
from .quality import write_page
from .strip import require
from .template import SPACE

TABLE = "prepared.csv"
_SHOWN = 8  # kinds of series that are left out


@dataclass(frozen=True)
class Found:
    """The scans to prepare.

    Attributes:
        records: one for each visit, those that cannot be used left out.
        left_out: how many are not wanted: other series, images that are no T1.
        problems: what is wrong with the others.
        diagnoses: table or folder of diagnoses over time; None: there is none.
        notes: what a user should know of how they were found.
    """

    records: list[ScanRecord]
    left_out: int
    problems: list[Problem]
    diagnoses: Path | None
    notes: tuple[str, ...] = ()


def find(
    root: Path,
    layout: Layout | None,
    names: Names,
    out: Path,
    *,
    collection_csv: Path | None = None,
    diagnosis_csv: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """The scans of a folder in any layout, of a table, of loose files or DICOM files, or one file.

    What is no NIfTI file is converted into ``out``.

    Raises:
        DataError: nothing there, or it cannot be read.
    """
    if root.is_file() and is_nifti(root):
        return Found([_loose(root, names)], 0, [], None)
    try:
        reading = read_source(
            root, layout, collection_csv=collection_csv, diagnosis_csv=diagnosis_csv, names=names
        )
    except FolderError as error:
        loose = [path for path in walk(root) if is_nifti(path)] if root.is_dir() else []
        if error.code != "NO_SCANS" or not (loose or has_dicom(root)):
            raise
        if not loose:
            return _of_dicom(*convert_dicom(root, out, names, progress), diagnosis_csv)
        return Found([_loose(path, names) for path in loose], 0, [], diagnosis_csv)
    if reading.layout == "caps":
        raise DataError(
            "ALREADY_PREPARED", "a CAPS folder", str(root), "its scans are registered already"
        )
    chosen = choose_series(reading.records)
    used = [record for record in chosen if record.used]
    bad = sum(bool(record.problem) for record in chosen)
    if reading.clinical is not None:  # the group at the scan is not the diagnosis: no label is
        used = [replace(record, dx_bl="") for record in used]
    diagnoses = reading.clinical.path if reading.clinical is not None else None
    used = [as_nifti(record, out) for record in used]
    return Found(used, len(chosen) - len(used) - bad, list(reading.problems), diagnoses)


def _of_dicom(
    records: Sequence[ScanRecord], others: Counter[str], diagnosis_csv: Path | None
) -> Found:
    used = [record for record in choose_series(records) if record.used]
    people = {record.subject for record in records}
    notes = [f"{len(records)} T1-weighted series of {len(people)} people by their patient IDs"]
    if others:
        listed = ", ".join(f"{n} x {name}" for name, n in others.most_common(_SHOWN))
        dots = ", ..." * (len(others) > _SHOWN)
        notes.append(f"series that are no T1-weighted heads by their names: {listed}{dots}")
    left_out = len(records) - len(used) + others.total()
    return Found(used, left_out, [], diagnosis_csv, tuple(notes))


def _loose(path: Path, names: Names) -> ScanRecord:
    return replace(
        bare_record(path, names.person(stem(path)), stem(path), "csv"),
        session=names.session(stem(path)),
    )


def caps_path(record: ScanRecord, resolution_mm: float) -> Path:
    """Where a prepared scan goes, as Clinica's ``t1-linear`` would put it."""
    subject = record.subject
    name = f"ADNI{subject}" if PTID.fullmatch(subject) else subject
    sub, ses = (
        f"{kind}-{re.sub('[^0-9A-Za-z]', '', text)}"
        for kind, text in (
            ("sub", name),
            ("ses", record.session or record.acq_date or record.image_id),
        )
    )
    size = f"{resolution_mm:g}"
    space = f"space-{SPACE}_res-{size}x{size}x{size}"
    return Path("subjects", sub, ses, "t1_linear", f"{sub}_{ses}_{space}_T1w.nii.gz")


def prepare(
    out: Path,
    records: Sequence[ScanRecord],
    settings: Settings,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Prepared]:
    """Prepare scans, write the table of those that succeeded and the page of all.

    What was prepared before from the same file in the same way is left as it is.

    Raises:
        DataError: a tool is missing, or two scans would get one name.
    """
    simple_itk()
    if settings.strip != "none":
        require(settings.strip)
    paths = [caps_path(record, settings.resolution_mm) for record in records]
    _refuse_one_name(records, paths)
    done: list[Prepared] = []
    for one in _all(partial(prepare_scan, out, settings), records, paths, workers):
        done.append(one)
        if progress:
            progress(len(done), len(records))
    rows = [_row(out, one) for one in done if not one.code]
    write_joined(out / TABLE, rows)
    _write_quality(out, done)
    return done


def _all(
    job: Callable[[ScanRecord, Path], Prepared],
    records: Sequence[ScanRecord],
    paths: Sequence[Path],
    workers: int,
) -> Iterator[Prepared]:
    if workers <= 1:
        yield from map(job, records, paths)
        return
    # fresh processes: a forked copy of a threaded parent may hang
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(job, records, paths)


def _refuse_one_name(records: Sequence[ScanRecord], paths: Sequence[Path]) -> None:
    seen: dict[Path, ScanRecord] = {}
    for record, path in zip(records, paths):
        other = seen.setdefault(path, record)
        if other is not record:
            raise DataError(
                "TWO_NAMES",
                f"{other.path} and {record.path} would both become {path.name}",
                str(path.parent),
                "give the sessions or people other names",
            )


def _row(out: Path, one: Prepared) -> dict[str, object]:
    record = one.record
    values: dict[str, object] = {name: getattr(record, name, "") for name in COLUMNS}
    return {**values, "path": one.path, "label": record.dx_bl, "registered": "yes"}


def _write_quality(out: Path, done: Sequence[Prepared]) -> None:
    rows: list[dict[str, object]] = []
    for one in done:
        picture = one.path.with_name(one.path.name.removesuffix(".nii.gz") + "_quality.png")
        record = one.record
        rows.append(
            {
                "subject": record.subject,
                "session": record.session,
                "image_id": record.image_id,
                "problem": f"{one.code}: {one.detail}" if one.code else "",
                **{name: one.measures[name] for name in MEASURES},
                "picture": picture.as_posix() if (out / picture).is_file() else "",
            }
        )
    write_page(out / "quality.html", rows)
    write_atomically(out / "quality.tsv", table_bytes(rows))
