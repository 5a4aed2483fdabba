import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_table(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with the same keys as tab-separated values, fractions to four digits.

    The file is either complete or not there.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]) if rows else [], delimiter="\t")
        table.writeheader()
        for row in rows:
            rounded = {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}
            table.writerow({**row, **rounded})
    part.replace(path)


def read_table(path: Path) -> list[dict[str, str]]:
    """Rows of a table of tab-separated values."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))
