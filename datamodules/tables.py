"""Reading CSV files that people have opened in spreadsheets.

Accepts UTF-8 with or without BOM, UTF-16 with BOM and Windows-1252; comma, semicolon and tab; above
the header Excel's ``sep=;`` and lines that begin with ``#``.
Column names are compared without case, spaces, dots and underscores. All values stay text:
converting ``0295`` or ``NA`` is the business of whoever knows the column.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import TableError

_DELIMITERS = (",", ";", "\t")
MISSING = (
    *("", ".", "-", "?", "na", "n/a", "n.a.", "#n/a", "nan", "none", "null", "#null!"),
    *("nd", "missing", "unknown", "unk", "not available", "-1", "-4", "-9", "-99", "-999"),
)
"""Lower-case words that stand for no value."""


@dataclass(frozen=True)
class Table:
    """A table as text.

    Attributes:
        path: of the file.
        rows: cells by normalised column name.
        lines: number in the file of each row's line.
        note: how the file was read, when it is not comma-separated UTF-8.
    """

    path: Path
    rows: tuple[dict[str, str], ...]
    lines: tuple[int, ...]
    note: str = ""


def table_bytes(
    rows: Sequence[Mapping[str, object]],
    columns: Sequence[str] = (),
    *,
    delimiter: str = "\t",
    quoting: Literal[0, 1] = csv.QUOTE_MINIMAL,
) -> bytes:
    """A table in UTF-8; None is an empty cell.

    Args:
        rows: cells by column, the same columns in all of them.
        columns: their order; those of the first row if not given.
        delimiter: between cells.
        quoting: ``csv.QUOTE_ALL`` as the portal does, or only where it must be.
    """
    buffer = io.StringIO()
    names = columns or list(rows[0])
    writer = csv.DictWriter(
        buffer, names, delimiter=delimiter, quoting=quoting, lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode()


def one_row_each(
    table: Table, key: Callable[[Mapping[str, str]], str]
) -> dict[str, tuple[dict[str, str], int]]:
    """The row of each key, and its line; the same row again is one.

    Raises:
        TableError: ``TWO_ROWS``: two rows of a key differ, and nothing says which one is right.
    """
    found: dict[str, tuple[dict[str, str], int]] = {}
    for row, line in zip(table.rows, table.lines):
        first, where = found.setdefault(key(row), (row, line))
        differ = [
            f"{name} {first.get(name, '')!r} and {row[name]!r}"
            for name in row
            if first.get(name) != row[name]
        ]
        if differ and key(row):
            raise TableError(
                "TWO_ROWS",
                f"lines {where} and {line} are both of {key(row)}: {', '.join(differ[:5])}",
                str(table.path),
                "keep the right row; what changes from visit to visit belongs into a table of "
                "sessions",
            )
    return found


def normalise(column: str) -> str:
    """``Image Data ID``, ``image_data_id`` and ``Image.Data.ID`` are one column."""
    return re.sub(r"[\s_.]+", "", column).lower()


def header_of(path: Path) -> set[str]:
    """The normalised column names of a table; nothing for a file that is none."""
    try:
        text, _ = _decode(path)
    except TableError:
        return set()
    first = next(line for line in text.splitlines() if line.strip())
    headers = [next(csv.reader([first], delimiter=mark)) for mark in _DELIMITERS]
    return set(_renamed([normalise(name) for name in max(headers, key=len)], {}))


def read_table(
    path: Path, required: Collection[str], aliases: Mapping[str, Sequence[str]] | None = None
) -> Table:
    """Read a table that has at least the ``required`` (normalised) columns, and one row.

    Args:
        path: the file.
        required: columns without which it is another table.
        aliases: other names of a column, in the order of preference.

    Raises:
        TableError: missing, empty or undecodable file, wrong or doubled columns, a row with more
            values than the header, or a header alone.
    """
    text, encoding = _decode(path)
    delimiter = _delimiter(path, text, required, aliases or {})
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    names: list[str] | None = None
    rows, lines = [], []
    for values in reader:
        if not any(value.strip() for value in values):
            continue
        if names is None:
            names = _renamed([normalise(value) for value in values], aliases or {})
            continue
        if len(values) > len(names) and any(values[len(names) :]):
            raise _bad(
                path,
                f"line {reader.line_num} has {len(values)} values for {len(names)} columns",
                "put quotes around the value that holds the separator, or export the table again",
            )
        rows.append({name: value.strip() for name, value in zip(names, values)})
        lines.append(reader.line_num)
    if not rows:
        raise _bad(path, "a header and no rows", "export the table again from the portal")
    how = [encoding, "semicolons" if delimiter == ";" else ""]
    note = " and ".join(part for part in how if part)
    return Table(path, tuple(rows), tuple(lines), f"{path.name}: read with {note}" if note else "")


def _renamed(names: list[str], aliases: Mapping[str, Sequence[str]]) -> list[str]:
    """Columns under the name that the reader uses, and without units: ``age(years)``."""
    bare = [re.sub(r"(?<=.)[(\[].*[)\]]$", "", name) for name in names]
    alone = Counter(bare)  # of `MMSE (bl)` and `MMSE (m12)` neither is MMSE
    names = [short if alone[short] == 1 else name for short, name in zip(bare, names)]
    for wanted, others in aliases.items():
        found = next((name for name in others if name in names), None)
        if wanted not in names and found is not None:
            names = [wanted if name == found else name for name in names]
    return names


def _bad(path: Path, found: str, action: str) -> TableError:
    return TableError("BAD_TABLE", found, str(path), action)


def _decode(path: Path) -> tuple[str, str]:
    """The text, and the encoding when it is an unusual one."""
    encoding = ""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}", "check the path") from None
    if not data.strip():
        raise _bad(path, "an empty file", "export the table again from the portal")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text, encoding = data.decode("utf-16", errors="replace"), "UTF-16"
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text, encoding = data.decode("cp1252", errors="replace"), "Windows-1252"
    if "\0" in text:
        raise _bad(path, "NUL bytes: not a text file", "save it as CSV in UTF-8")
    if text.lstrip()[:15].lower().startswith(("<!doctype", "<html")):
        raise _bad(path, "a web page", "log in to the portal and export the table again")
    # the lines that are left out are kept empty: lines are counted in messages
    head = re.match(r"(?:\s*(?:sep=.|#[^\r\n]*)\r?\n)+", text, re.IGNORECASE)
    return ("\n" * head[0].count("\n") + text[head.end() :] if head else text), encoding


def _delimiter(
    path: Path, text: str, required: Collection[str], aliases: Mapping[str, Sequence[str]]
) -> str:
    """The one delimiter under which all required columns appear."""
    first = next(line for line in text.splitlines() if line.strip())
    headers = {mark: next(csv.reader([first], delimiter=mark)) for mark in _DELIMITERS}
    best = max(headers, key=lambda mark: len(headers[mark]))
    header = [name.strip() for name in headers[best]]
    names = Counter(_renamed([normalise(name) for name in header if name], aliases))
    missing = [name for name in required if name not in names]
    if missing:
        raise _bad(
            path,
            f"no column {', '.join(missing)}; the header is: {', '.join(header)[:300]}",
            "rename its columns; from the portal export the table of the collection (Data "
            "Collections, CSV)",
        )
    doubled = [name for name, count in names.items() if count > 1]
    if doubled:
        raise _bad(path, f"the column {doubled[0]} appears twice", "remove one of them")
    return best
