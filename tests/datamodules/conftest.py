from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cohorts import made

from datamodules import montage, unlike
from datamodules.synth import CohortSpec

TINY = CohortSpec(
    subjects=(("AD", 6), ("NC", 6), ("sMCI", 1)),
    resolution_mm=8.0,
    difficulty="L1",
    visits=("bl", "m12"),
)
RAW_HEADS = CohortSpec((("AD", 2), ("NC", 2)), resolution_mm=4.0, difficulty="L2")


@pytest.fixture(scope="session")
def tiny_cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed: take ``download`` for that."""
    return made(tmp_path_factory, TINY)


@pytest.fixture(scope="session")
def raw_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return made(tmp_path_factory, RAW_HEADS)


@pytest.fixture
def download(tiny_cohort: Path, tmp_path: Path) -> Path:
    """A copy of the tiny cohort that a test may damage."""
    return Path(shutil.copytree(tiny_cohort, tmp_path / "download"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """``check`` draws no picture of the scans, which takes ten times as long as the rest."""
    monkeypatch.setattr(montage, "write_montage", lambda path, *what: path.touch())


@pytest.fixture(autouse=True)
def uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans are not compared with the mean of the others, which takes seconds for each cohort."""
    monkeypatch.setattr(unlike, "compare", lambda scans: None)


@pytest.fixture
def table(download: Path) -> Path:
    return next(download.glob("SYNTHETIC*.csv"))


@pytest.fixture
def edit(table: Path) -> Callable[[Callable[[list[str]], list[str]]], None]:
    """Apply a function to the lines of the collection table."""

    def apply(change: Callable[[list[str]], list[str]]) -> None:
        table.write_text("\n".join(change(table.read_text().splitlines())) + "\n")

    return apply
