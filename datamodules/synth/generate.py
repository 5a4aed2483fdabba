"""Write a synthetic cohort: the scans, their tables and, beside them, the truth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic import write_atomically
from ..errors import FolderError
from ..sources.tree import TRUTH_MARKER
from ..tables import table_bytes
from .anatomy import Anatomy, build_anatomy
from .clinical import mmse
from .cohort import CohortSpec, ScanPlan, plan_cohort
from .files import FileForm, draw_form, write_volume
from .layouts import LAYOUTS, scan_name
from .levels import LEVELS, Level
from .render import Rendered, render
from .subject import draw_head, draw_scanner, tilted

FORMAT_VERSION = 3  # raise it whenever the same spec gives other bytes than before
TRUTH_FOLDER = "truth"
_COIL = 0.1  # what the receiver coil of a raw scan adds to the amplitude of the bias field


@dataclass(frozen=True)
class CohortSummary:
    """A cohort on disk.

    Attributes:
        folder: where the cohort lies.
        files: number of files.
        total_bytes: their size.
        already_complete: whether all of it was there before.
    """

    folder: Path
    files: int
    total_bytes: int
    already_complete: bool


def generate(
    out: str | Path,
    spec: CohortSpec,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> CohortSummary:
    """Write the cohort to ``out``; return at once when the same one is already there.

    The data lie as the cohort's layout says, for a download in ``out/ADNI`` and ``out/*.csv`` (the
    collection table and ADNIMERGE); the truth (``truth.tsv``, planted masks and effect maps on each
    scan's own grid) lies in ``out/truth``.

    Args:
        out: a folder that is missing, empty, or holds the same cohort, complete or not.
        spec: what to generate.
        workers: processes; the result does not depend on it.
        progress: called with (scans done, all scans).

    Raises:
        FolderError: ``out`` holds something else.
    """
    folder = Path(out)
    done = _existing(folder, spec)
    if done is not None:
        return CohortSummary(folder, len(done), sum(done.values()), already_complete=True)
    plans = [plan for plan in plan_cohort(spec) if LAYOUTS[spec.layout].holds(plan)]
    marker = folder / TRUTH_FOLDER / TRUTH_MARKER
    write_atomically(marker, _marker_bytes(spec, None))
    for part in folder.rglob(".*.part"):  # of a run that was killed
        part.unlink()
    files: dict[str, int] = {}
    truth: list[dict[str, object]] = []
    paths: dict[int, str] = {}
    for count, written in enumerate(_render_all(folder, spec, plans, workers), start=1):
        files.update(written.files)
        paths[plans[count - 1].image_id] = written.scan
        truth += [written.truth] if written.truth else []
        if progress:
            progress(count, len(plans))
    tables = LAYOUTS[spec.layout].tables(spec, plans, paths)
    tables[f"{TRUTH_FOLDER}/truth.tsv"] = table_bytes(truth)
    for name, content in tables.items():
        write_atomically(folder / name, content)
        files[name] = len(content)
    write_atomically(marker, _marker_bytes(spec, files))
    return CohortSummary(folder, len(files), sum(files.values()), already_complete=False)


def _marker_bytes(spec: CohortSpec, files: dict[str, int] | None) -> bytes:
    content = {"format": FORMAT_VERSION, "spec": asdict(spec), "files": files}
    return (json.dumps(content, indent=1) + "\n").encode()


def _existing(folder: Path, spec: CohortSpec) -> dict[str, int] | None:
    """The files of the same, complete cohort in ``folder``, or None if it has to be made."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    marker = folder / TRUTH_FOLDER / TRUTH_MARKER
    if not marker.is_file():
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else ["a file"]
        raise FolderError(
            "NOT_EMPTY",
            f"not a synthetic cohort, and not empty: {', '.join(names[:5])}",
            str(folder),
            "give a new folder",
        )
    content = json.loads(marker.read_text())
    wanted = json.loads(_marker_bytes(spec, None))
    its = {
        "elsewhere": False,
        "raw": False,
        **content["spec"],
    }  # older cohorts have no such entries
    if (content["format"], its) != (wanted["format"], wanted["spec"]):
        raise FolderError(
            "OTHER_COHORT",
            f"a synthetic cohort made with other parameters: {content['spec']}",
            str(folder),
            f"give a new folder, or remove this one to make {wanted['spec']}",
        )
    files: dict[str, int] | None = content["files"]
    if files is None or not all(_has_size(folder / path, size) for path, size in files.items()):
        return None
    return files


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


@dataclass(frozen=True)
class _Written:
    """The files of one scan.

    Attributes:
        scan: path of the scan, relative to the cohort's folder.
        files: bytes by path relative to the cohort's folder.
        truth: the row of truth.tsv; None for what is no T1 scan.
    """

    scan: str
    files: dict[str, int]
    truth: dict[str, object] | None


def _render_all(
    folder: Path, spec: CohortSpec, plans: list[ScanPlan], workers: int
) -> Iterator[_Written]:
    job = partial(_write_scan, folder, spec)
    if workers <= 1:
        yield from map(job, plans)
        return
    # fresh processes: a forked copy of a threaded parent may hang
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(job, plans)


@cache
def _anatomy(resolution_mm: float) -> Anatomy:
    return build_anatomy(resolution_mm)


def _level(spec: CohortSpec) -> Level:
    """What ``t1-linear`` leaves of the variety of raw scans: no pose, the skull still on."""
    level = LEVELS[spec.difficulty]
    if spec.elsewhere:
        level = replace(level, scanners=True)
    return replace(level, pose=0.0) if spec.layout == "caps" and level.raw else level


def render_plan(
    spec: CohortSpec, plan: ScanPlan, *, severity: float | None = None
) -> tuple[Rendered, FileForm]:
    """Render one planned scan, with another severity if one is given (0: its healthy twin)."""
    level = _level(spec)
    number = plan.subject.number
    head_rng = np.random.default_rng([spec.seed, number, 0])
    repeat = 1 if plan.kind == "repeat" else 0
    scan_rng = np.random.default_rng([spec.seed, number, 3, plan.months, repeat])
    head, scanner = draw_head(head_rng, level), draw_scanner(plan.subject.scanner, level)
    if spec.raw:
        lying = np.random.default_rng([spec.seed, number, 5, plan.months, repeat])
        head = tilted(head, lying)
        scanner = replace(scanner, bias=scanner.bias + _COIL)
    form = draw_form(scan_rng, spec, head.shift_mm)
    rendered = render(
        _anatomy(spec.resolution_mm),
        level,
        form.grid,
        head,
        plan.severity if severity is None else severity,
        scanner,
        scan_rng,
        face=spec.raw,
    )
    return rendered, form


def _write_scan(folder: Path, spec: CohortSpec, plan: ScanPlan) -> _Written:
    rendered, form = render_plan(spec, plan)
    scan = LAYOUTS[spec.layout].path(plan, spec, form.suffix)
    if plan.kind == "mask":
        size = write_volume(folder / scan, rendered.brain, form, "uint8")
        return _Written(scan.as_posix(), {scan.as_posix(): size}, None)
    name = scan_name(plan, spec.layout)
    planted = Path(TRUTH_FOLDER, "planted", f"{name}.nii.gz")
    effect = Path(TRUTH_FOLDER, "effect", f"{name}.nii.gz")
    write = LAYOUTS[spec.layout].write
    written = (
        {scan.as_posix(): write_volume(folder / scan, rendered.image, form, form.storage)}
        if write is None
        else write(folder, scan, rendered.image, form, plan)
    )
    files = {
        **written,
        planted.as_posix(): write_volume(folder / planted, rendered.planted, form, "uint8"),
        effect.as_posix(): write_volume(folder / effect, rendered.effect, form, "float32"),
    }
    paths = {"path": scan, "planted": planted, "effect": effect}
    truth = {"subject": plan.subject.ptid, "image_id": name, **_truth_row(plan, rendered, form)}
    if spec.raw:
        truth["to_template"] = " ".join(f"{x:.5f}" for x in rendered.to_template.ravel())
    return _Written(
        scan.as_posix(), files, truth | {key: path.as_posix() for key, path in paths.items()}
    )


def _truth_row(plan: ScanPlan, rendered: Rendered, form: FileForm) -> dict[str, Any]:
    left, right = rendered.hippocampus_ml
    return {
        "diagnosis": plan.subject.diagnosis,
        "expected": "" if plan.months else plan.subject.course.expected,
        "visit": plan.visit,
        "repeat": int(plan.kind == "repeat"),
        "severity": f"{plan.severity:.4f}",
        "sex": plan.subject.sex,
        "age": f"{plan.age:.1f}",
        "mmse": f"{mmse(plan.subject, plan.months):.0f}",
        "phase": plan.subject.phase,
        "scanner": plan.subject.scanner,
        "hippocampus_left_ml": f"{left:.3f}",
        "hippocampus_right_ml": f"{right:.3f}",
        "ventricles_ml": f"{rendered.ventricles_ml:.3f}",
        "planted_voxels": int(rendered.planted.sum()),
        "orientation": form.orientation,
        "spacing_mm": " ".join(f"{size:.3f}" for size in form.grid.spacing_mm),
    }
