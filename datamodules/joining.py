"""Several cohorts in one run: one table of their scans, with a column that names the cohort.

Each cohort is read as it lies, with its own layout and tables; what is written is a table of scans
as one of one's own, which every command takes. Two cohorts must not share a name of a person: the
same name is a different person in each, or the same one in two cohorts, and neither can be guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .atomic import write_atomically
from .errors import DataError
from .labels import Task
from .records import ScanRecord
from .tables import table_bytes

COLUMNS = (
    "path",
    "subject",
    "label",
    "cohort",
    "image_id",
    "session",
    "age",
    "sex",
    "mmse",
    "cdr_sb",
    "apoe4",
    "acq_date",
    "field_strength",
    "phase",
    "site",
    "registered",
    "scanner",
)


def joined(cohorts: Mapping[str, Sequence[ScanRecord]], task: Task) -> list[dict[str, object]]:
    """A row for each used scan of each cohort; an image ID that two of them have gets its cohort's.

    Raises:
        DataError: ``TWO_COHORTS``: a person's name occurs in two of them.
    """
    home: dict[str, str] = {}
    ids: set[str] = set()
    rows: list[dict[str, object]] = []
    for cohort, records in cohorts.items():
        own = [record for record in records if record.used and record.label is not None]
        twice = sorted({r.subject for r in own if home.setdefault(r.subject, cohort) != cohort})
        if twice:
            raise DataError(
                "TWO_COHORTS",
                f"{len(twice)} name(s) of people occur in {home[twice[0]]} and in {cohort}: "
                f"{', '.join(twice[:5])}",
                own[0].path,
                "if they are the same people, give both folders the same name of a cohort; if not, "
                "give them other names in the tables of one of them",
            )
        taken = {r.image_id for r in own} & ids
        ids |= {record.image_id for record in own}
        rows += [_row(r, cohort, task, r.image_id in taken) for r in own]
    return rows


def _row(record: ScanRecord, cohort: str, task: Task, taken: bool) -> dict[str, object]:
    values = {name: getattr(record, name, "") for name in COLUMNS}
    assert record.label is not None
    label = record.dx if task.number else task.class_names[record.label]
    image_id = f"{cohort}_{record.image_id}" if taken else record.image_id
    return {**values, "label": label, "cohort": cohort, "image_id": image_id}


def write_joined(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the table, atomically; paths in it are absolute."""
    write_atomically(path, table_bytes(rows, COLUMNS, delimiter=","))
