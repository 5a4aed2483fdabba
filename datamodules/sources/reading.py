"""What every source hands over, whatever its layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ..errors import Problem
from ..records import ScanRecord
from .clinical import Clinical

Layout = Literal["ida", "bids", "caps", "csv", "oasis"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True)
class Reading:
    """Scans that have no label yet, and what was wrong with them or with rows of a table.

    Attributes:
        layout: how the scans lie on disk.
        records: one for each scan found; those with a ``problem`` are bad already.
        problems: what is wrong, one for each bad scan and for each row without a scan.
        clinical: diagnoses over time, or None when there are none.
        groups: table and column that give the labels when there are none.
        tables: the tables that were read.
        notes: what was read in an unusual way, for the summary.
    """

    layout: Layout
    records: list[ScanRecord]
    problems: list[Problem]
    clinical: Clinical | None = None
    groups: str = ""
    tables: tuple[Path, ...] = ()
    notes: tuple[str, ...] = field(default=())
