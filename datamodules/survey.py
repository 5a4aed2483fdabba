"""Everything that is found out about a data folder before training: who, what, and is it sound."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .atomic import write_atomically
from .checks import check_records
from .errors import DataError, FolderError, Problem, tally
from .labelling import label_records
from .labels import Task
from .nifti import STRICT, Leniency
from .profiles import refuse_mixture
from .progression import LabelRule
from .records import ScanRecord, count_line
from .sources import Layout, Names, Reading, data_folders, read_source
from .sources.people import Named, refuse_other_spelling, refuse_two_names
from .space import name_grids
from .tables import table_bytes
from .unlike import Unlike, name_unlike

_EXAMPLES = 2  # of one kind of warning
_AROUND_BRAIN_MM = 8.0  # scalp and bone, where they are thin


@dataclass(frozen=True)
class Survey:
    """What a data folder holds for one task.

    Attributes:
        root: the data folder, or the table of scans.
        layout: how the scans lie on disk.
        tables: that were read.
        records: one for each scan found.
        problems: each makes a scan bad or names a missing one.
        warnings: of what does no harm.
        labels: where the labels come from.
        notes: what was read in an unusual way.
    """

    root: Path
    layout: Layout
    tables: tuple[Path, ...]
    records: list[ScanRecord]
    problems: list[Problem]
    warnings: list[Problem]
    labels: str
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Counts that add up, and what lies behind them."""
        reasons = Counter(r.reason.partition(":")[0] for r in self.records if r.reason)
        names = " and ".join(path.name for path in self.tables)
        lines = [f"{self.root} ({self.layout}) with {names}", f"labels: {self.labels}"]
        lines.append(count_line(self.records))
        if reasons:
            lines.append("excluded: " + ", ".join(f"{n} x {r}" for r, n in reasons.most_common()))
        if self.problems:
            lines.append(tally(self.problems))
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *_by_kind(self.warnings), *notes])


def _by_kind(warnings: Sequence[Problem]) -> list[str]:
    """One line per kind, which stands before the colon of the detail, with the first few."""
    kinds: dict[str, list[str]] = defaultdict(list)
    scans: Counter[str] = Counter()
    for warning in warnings:
        kind, _, measures = warning.detail.partition(": ")
        name = f"{warning.code}, {kind}"
        kinds[name].append(measures)
        scans[name] += warning.scans
    lines = []
    for name, values in kinds.items():
        different = list(dict.fromkeys(values))
        dots = "; ..." if len(different) > _EXAMPLES else ""
        lines.append(f"warning: {scans[name]} x {name}: {'; '.join(different[:_EXAMPLES])}{dots}")
    return lines


def survey(
    root: Path,
    task: Task,
    store: Path | None,
    *,
    layout: Layout | None = None,
    rule: LabelRule | None = None,
    leniency: Leniency = STRICT,
    collection_csv: Path | None = None,
    diagnosis_csv: Path | None = None,
    names: Names = Names(),  # noqa: B008 (frozen)
    unlike: Unlike = "error",
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Find the scans, join them with their tables, label them and read every used file to its end.

    Args:
        root: the data folder, or a table of scans; nothing is written there.
        task: which diagnoses become which label.
        store: file for the results of the reading, outside ``root``; None: files are not read.
        layout: how the scans lie on disk; None: found out.
        rule: horizon and the like of the labels.
        leniency: what is repaired on loading instead of refused.
        collection_csv: the portal's collection table; None: the only one directly in ``root``.
        diagnosis_csv: diagnoses at each visit; None: those in ``root``, or else the groups that
            the source gives.
        names: how names of people and words of diagnoses are read.
        unlike: whether scans that are no heads like the others are bad, or used and warned of.
        progress: called with (files read, files to read).

    Raises:
        DataError: the task needs diagnoses over time and there are none.
        FolderError: no such folder, no scans in it, or no layout that fits.
        TableError: a table is missing, ambiguous or not understood.
    """
    root = root.absolute()  # paths in manifests must not depend on where a run was started
    reading = read_source(
        root,
        layout,
        collection_csv=collection_csv,
        diagnosis_csv=diagnosis_csv,
        names=names,
    )
    own = reading.layout == "csv" or bool(names.label_column)
    if task.needs_history and reading.clinical is None and not own:
        raise DataError(
            "NEEDS_HISTORY",
            f"task {task.name}: stable and progressive MCI differ in later visits only",
            str(root),
            "put ADNIMERGE or DXSUM there, or name it with --data.diagnosis_csv / --diagnosis-csv",
        )
    records, problems = label_records(reading.records, task, rule or LabelRule(), reading.clinical)
    if reading.clinical is not None:
        strangers = (r.subject for r in records if r.reason == "missing")
        refuse_other_spelling(strangers, reading.clinical.persons, str(reading.clinical.path))
    if not names.pattern:
        people = (Named(r.subject, r.sex, r.dx or r.dx_bl) for r in records)
        refuse_two_names(people, str(_first(reading.tables, root)))
    warnings: list[Problem] = []
    problems = [*reading.problems, *problems]
    if store is not None:
        records, bad, warnings = check_records(records, store, leniency=leniency, progress=progress)
        records, mixed = refuse_mixture(records)
        problems += [*bad, *mixed]
        records, others = name_unlike(records, store, leniency, unlike)
        warnings = [*warnings, *name_grids(records)]
        if unlike == "error":
            problems += others
        else:
            warnings += others
    if not own and not task.everybody:
        warnings += _research_groups(reading, records)
    clinical = reading.clinical
    tables = tuple(dict.fromkeys((*reading.tables, *((clinical.path,) if clinical else ()))))
    labels = clinical.says if clinical else reading.groups
    notes = reading.notes + (clinical.notes if clinical else ())
    return Survey(root, reading.layout, tables, records, problems, warnings, labels, notes)


def _first(tables: Sequence[Path], root: Path) -> Path:
    return tables[0] if tables else root


def refuse_nothing(found: Survey) -> None:
    """Raise where no scan is left to use.

    Raises:
        DataError: ``NOTHING_USED``, with the most frequent cause.
    """
    if any(record.used for record in found.records):
        return
    causes = Counter(r.problem or r.reason.partition(":")[0] for r in found.records)
    cause, scans = causes.most_common(1)[0]
    raise DataError(
        "NOTHING_USED",
        f"none of {len(found.records)} scans is used; {scans} of them: {cause}",
        str(found.root),
        _REMEDIES.get(cause, "the manifest has each reason, docs/adni.md their meaning"),
    )


_REMEDIES = {
    "NOT_NIFTI": "convert them: `python -m datamodules prepare ROOT OUT` takes DICOM and OASIS-1",
    "not_in_task": "choose another --task / --data.task, or give scans of its classes",
    "not_t1": "give T1-weighted scans, or correct the names of the series in the table",
    "missing": "give diagnoses of these people: --data.diagnosis_csv / --diagnosis-csv",
    "no_dx_near_scan": "give a table with visits near the scans, or the sessions' own names",
    "no_age": "give a table with ages",
    "no_mmse": "give a table that has MMSE, as ADNIMERGE: --data.diagnosis_csv / --diagnosis-csv",
    "no_dates": "give a table with examination dates: --data.diagnosis_csv / --diagnosis-csv",
}


def _research_groups(reading: Reading, records: Sequence[ScanRecord]) -> list[Problem]:
    """A warning when labels are no diagnoses; a table of one's own says what it means."""
    if reading.clinical is not None or reading.layout == "oasis":
        return []
    return [
        Problem(
            "RESEARCH_GROUP",
            "the label is the research group, not the diagnosis at the scan: " + reading.groups,
            "put ADNIMERGE or DXSUM there, or name it with --data.diagnosis_csv / --diagnosis-csv",
            str(reading.tables[0]),
            scans=sum(record.label is not None and record.used for record in records),
        )
    ]


def cut_brains(
    records: Sequence[ScanRecord], spatial_shape: tuple[int, int, int], spacing_mm: float
) -> list[Problem]:
    """A warning for each scan of which the crop loses brain.

    Of a stripped brain that is more than a voxel at one side. A raw head may lose what lies around
    the brain, scalp and bone. Registered heads are not looked at: their box is the same for all.
    """
    warnings = []
    for record in records:
        if not record.used or not record.reach:
            continue
        if record.stripped != "yes" and record.registered == "yes":
            continue
        what, spare = ("brain", 0.0) if record.stripped == "yes" else ("head", _AROUND_BRAIN_MM)
        reach = [float(side) for side in record.reach.split()]
        lost = max(side / 2 - spacing_mm * n / 2 for side, n in zip(reach, spatial_shape))
        if lost > spare + spacing_mm:
            detail = f"{what} cut off by spatial_shape: {lost:.0f} mm at one side"
            who = (record.path, record.subject, record.image_id)
            warnings.append(Problem("GEOMETRY", detail, "use a larger spatial_shape", *who))
    return warnings


def refuse_inside(root: Path, path: Path, what: str) -> None:
    """Raise unless ``path`` lies outside the data folder ``root``, or the folders of a table."""
    for folder in data_folders(root):
        if path.resolve().is_relative_to(folder.resolve()):
            raise FolderError(
                "INSIDE_DATA",
                f"{what} {path} lies inside the data folder, where nothing is ever written",
                str(folder),
                f"give another {what}",
            )


def write_problems(path: Path, found: Survey) -> None:
    """Write problems and warnings as a tab-separated table, atomically."""
    levels = {"problem": found.problems, "warning": found.warnings}
    rows = [{"level": level, **asdict(one)} for level, own in levels.items() for one in own]
    columns = ["level", *(field.name for field in fields(Problem))]
    write_atomically(path, table_bytes(rows, columns))
