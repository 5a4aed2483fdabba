"""``python -m datamodules synth|check|manifest|split``.

Exit codes: 0 done (warnings included), 1 problems with the data, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from .errors import DataError
from .labels import TASKS
from .progress import progress_bar
from .records import write_manifest
from .splits import SPLITS, make_split, save_split
from .survey import Survey, refuse_inside, survey, write_problems
from .synth.levels import GROUPS, Diagnosis, Difficulty


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m datamodules", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_synth(commands.add_parser("synth", help="write a synthetic cohort"))
    check = commands.add_parser("check", help="read every file and report every problem")
    check.add_argument("--out", type=Path, default=Path("adni_check"), help="folder for the report")
    check.set_defaults(run=_check)
    manifest = commands.add_parser("manifest", help="list the scans, without reading them")
    manifest.add_argument("--out", type=Path, default=Path("adni_check/manifest.tsv"))
    manifest.set_defaults(run=_manifest)
    split = commands.add_parser("split", help="split the subjects into train, val and test")
    split.add_argument("--out", type=Path, default=Path("adni_check/split.json"))
    split.add_argument("--val", type=float, default=0.15, help="share for validation")
    split.add_argument("--test", type=float, default=0.15, help="share for testing")
    split.add_argument("--seed", type=int, default=0)
    split.set_defaults(run=_split)
    for reader in (check, manifest, split):
        reader.add_argument("root", type=Path, help="folder of the download; never written to")
        reader.add_argument("--task", choices=sorted(TASKS), default="ad_nc")
        reader.add_argument(
            "--collection-csv", type=Path, help="default: the only CSV directly in ROOT"
        )
        reader.add_argument("--diagnosis-csv", type=Path, help="ADNIMERGE: diagnoses over time")
    return parser


def _add_synth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", help="folder to write to: new, or the same cohort")
    parser.add_argument(
        "--subjects",
        type=_subjects,
        default=_subjects("AD=8,NC=8"),
        metavar="N|AD=60,NC=60",
        help="subjects per diagnosis (NC, sMCI, pMCI, AD), or a total: half AD, half NC "
        "(default: AD=8,NC=8)",
    )
    parser.add_argument("--resolution", type=float, default=2.0, metavar="MM", help="default: 2")
    parser.add_argument(
        "--difficulty",
        choices=get_args(Difficulty),
        default="L1",
        help="L0: intensity drop in a box; L1: atrophy, registered and stripped (default); "
        "L2: atrophy with all the variety of raw scans",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--visits",
        type=lambda text: tuple(text.split(",")),
        default=("bl",),
        metavar="bl,m12",
        help="of bl, m06, m12, m24, m36 (default: bl)",
    )
    parser.add_argument(
        "--site-bias",
        type=float,
        default=0.0,
        metavar="0..1",
        help="how strongly the scanner gives the diagnosis away (default: 0)",
    )
    parser.set_defaults(run=_synth)


def _subjects(text: str) -> tuple[tuple[Diagnosis, int], ...]:
    if text.isdigit():
        text = f"AD={int(text) // 2},NC={int(text) - int(text) // 2}"
    counts: list[tuple[Diagnosis, int]] = []
    for part in text.split(","):
        name, _, count = part.partition("=")
        known = [group for group in GROUPS if group == name.strip()]
        if not known or not count.strip().isdigit():
            raise argparse.ArgumentTypeError(
                f"{part!r} is not DIAGNOSIS=NUMBER with a diagnosis of {', '.join(GROUPS)}"
            )
        counts.append((known[0], int(count)))
    return tuple(counts)


def _synth(options: argparse.Namespace) -> int:
    from .synth import CohortSpec, generate

    spec = CohortSpec(
        subjects=options.subjects,
        resolution_mm=options.resolution,
        difficulty=options.difficulty,
        seed=options.seed,
        visits=options.visits,
        site_bias=options.site_bias,
    )
    with progress_bar("scans") as advance:
        summary = generate(options.out, spec, workers=options.workers, progress=advance)
    state = "already complete" if summary.already_complete else "written"
    size = summary.total_bytes / 1e6
    print(f"{summary.folder}: {state}, {summary.files} files, {size:.1f} MB; truth in truth/")
    return 0


def _check(options: argparse.Namespace) -> int:
    refuse_inside(options.root, options.out, "--out")
    with progress_bar("files") as advance:
        found = survey(
            options.root,
            TASKS[options.task],
            options.out / "checks.json",
            collection_csv=options.collection_csv,
            diagnosis_csv=options.diagnosis_csv,
            progress=advance,
        )
    write_manifest(options.out / "manifest.tsv", found.records)
    write_problems(options.out / "problems.tsv", found.problems)
    print(found.summary())
    for problem in found.problems:
        print(problem)
    for warning in found.warnings:
        print(f"warning: {warning}")
    print(f"report: {options.out / 'manifest.tsv'}, {options.out / 'problems.tsv'}")
    return 1 if found.problems else 0


def _read_unchecked(options: argparse.Namespace) -> Survey:
    refuse_inside(options.root, options.out, "--out")
    found = survey(
        options.root,
        TASKS[options.task],
        None,
        collection_csv=options.collection_csv,
        diagnosis_csv=options.diagnosis_csv,
    )
    print(found.summary())
    return found


def _manifest(options: argparse.Namespace) -> int:
    found = _read_unchecked(options)
    write_manifest(options.out, found.records)
    print(f"manifest: {options.out}")
    return 1 if found.problems else 0


def _split(options: argparse.Namespace) -> int:
    found = _read_unchecked(options)
    split = make_split(found.records, options.val, options.test, options.seed)
    save_split(options.out, split)
    sizes = ", ".join(f"{name} {len(getattr(split, name))}" for name in SPLITS)
    print(f"split: {options.out}: {sizes} subjects, stratified on {split.stratified_on}")
    return 1 if found.problems else 0
