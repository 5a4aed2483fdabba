"""Commands about the data: make a synthetic cohort, prepare raw scans, check, list and split them.

Exit codes: 0 done (warnings included), 1 problems with the data, 2 wrong arguments.
"""

from __future__ import annotations

import sys
from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args, get_type_hints

from .errors import DataError, FolderError, Problem, SplitError, listing
from .joining import joined, write_joined
from .labels import TASKS
from .montage import write_montage
from .nifti import Leniency
from .prepare.strip import TOOLS
from .progress import progress_bar
from .progression import LabelRule
from .records import ScanRecord, read_manifest, write_manifest
from .report import demographics, p_values, write_demographics, write_shareable
from .screen import show, show_groups
from .sources import LAYOUTS, Names
from .sources.people import label_map
from .split_drawing import extend_split, make_split, rarest_classes
from .splits import SPLITS, load_split, save_split
from .survey import Survey, refuse_inside, refuse_nothing, survey, write_problems
from .synth.cohort import SynthLayout
from .synth.levels import GROUPS, Diagnosis, Difficulty
from .unlike import Unlike

_PROGRAM = "python -m datamodules"
_OUT = Path("adni_check")
_EXAMPLES = {
    "synth": "synth synthetic --subjects AD=12,NC=12 --resolution 4",
    "prepare": "prepare /data/ADNI_download /data/ADNI_prepared --strip deepbet",
    "check": "check /data/ADNI_download --out adni_check",
    "manifest": "manifest /data/ADNI_download --out adni_check/scans.tsv",
    "join": "join ADNI=/data/ADNI_download OASIS=/data/OASIS --out all.csv",
    "split": "split /data/ADNI_download --val 0.2 --test 0.2 --out adni_check/split.json",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:  # a folder that may not be looked into, a disk that fails
        where, what = str(error.filename or ""), error.strerror or str(error)
        print(DataError("NO_ACCESS", what, where, "check rights and disk"), file=sys.stderr)
        return 1
    return code


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=_PROGRAM,
        description=__doc__,
        epilog="examples:\n" + "\n".join(f"  {_PROGRAM} {line}" for line in _EXAMPLES.values()),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, what: str, run: Callable[[Namespace], int]) -> ArgumentParser:
        example = f"example: {_PROGRAM} {_EXAMPLES[name]}"
        command = commands.add_parser(
            name,
            help=what,
            description=what,
            epilog=example,
            allow_abbrev=False,  # what is cut short is more often a slip
        )
        command.set_defaults(run=run)
        return command

    synth = add("synth", "write a synthetic cohort", _synth)
    _add_cohort(synth)
    _add_variety(synth)
    prepare = add("prepare", "correct raw scans and bring them to MNI space", _prepare)
    check = add("check", "read every file and report every problem", _check)
    check.add_argument("--out", type=Path, default=_OUT, help=f"report folder (default: {_OUT})")
    manifest = add("manifest", "list the scans, without reading them", _manifest)
    _add_out(manifest, "scans.tsv")
    for writer in (check, manifest):
        writer.add_argument("--task", choices=sorted(TASKS), default="ad_nc")
        writer.add_argument("--force", action="store_true", help="replace files of other origin")
    join = add("join", "make one table of the scans of several cohorts", _join)
    _add_join(join)
    split = add("split", "split the subjects into train, val and test", _split)
    _add_split(split)
    for reader in (prepare, check, manifest, split):
        _add_source(reader)
    _add_preparation(prepare)
    for reader in (check, manifest, split):
        _add_rule(reader)
    return parser


def _add_join(parser: ArgumentParser) -> None:
    """Which cohorts; each has its own layout and tables, and one rule for the labels holds."""
    parser.add_argument(
        "cohorts",
        nargs="+",
        type=_cohort,
        metavar="NAME=ROOT",
        help="name and folder (or table) of a cohort; two folders of one name are one cohort",
    )
    parser.add_argument("--task", choices=sorted(TASKS), default="ad_nc")
    parser.add_argument("--force", action="store_true", help="replace the table")
    _add_out(parser, "joined.csv")
    _add_rule(parser)


def _cohort(text: str) -> tuple[str, Path]:
    name, found, root = text.partition("=")
    if not (name and found and root):
        raise ArgumentTypeError(f"{text!r} is not NAME=ROOT")
    return name, Path(root)


def _add_split(parser: ArgumentParser) -> None:
    """How subjects are held out."""
    _add_out(parser, "split.json")
    parser.add_argument("--val", type=float, default=0.15, help="share for validation")
    parser.add_argument("--test", type=float, default=0.15, help="share for testing")
    parser.add_argument(
        "--leave-out",
        default="",
        metavar="cohort=NAME|site=NUMBER",
        help="test on a whole cohort or site instead of --test",
    )
    parser.add_argument(
        "--folds", type=int, default=0, help="make so many folds instead of --val (default: none)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--task",
        choices=sorted(TASKS),
        action="append",
        help="give it once for each task that the split is to serve: who is held out in one is "
        "then not trained on in another (default: ad_nc, or those of --extend)",
    )
    parser.add_argument(
        "--extend",
        type=Path,
        metavar="OLD",
        help="keep this split and add new subjects to its training part or its folds",
    )


def _add_preparation(parser: ArgumentParser) -> None:
    """How raw scans are prepared."""
    parser.add_argument(
        "out", type=Path, help="folder to write to; a stopped command goes on there"
    )
    parser.add_argument(
        "--strip",
        choices=("none", *TOOLS),
        default="none",
        help="take skull and scalp away by this tool, which must be installed (default: none)",
    )
    parser.add_argument("--resolution", type=float, default=1.0, metavar="MM", help="default: 1")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")


def _add_source(parser: ArgumentParser) -> None:
    """Where the scans and their tables lie, and what is read without complaint."""
    parser.add_argument(
        "root", type=Path, help="folder of the data, or a table of scans; never written to"
    )
    parser.add_argument(
        "--layout", choices=("auto", *LAYOUTS), default="auto", help="default: found out"
    )
    parser.add_argument(
        "--collection-csv", type=Path, help="default: the only CSV directly in ROOT"
    )
    parser.add_argument(
        "--diagnosis-csv",
        type=Path,
        help="diagnoses over time: ADNIMERGE, DXSUM, a table of `clinica iotools merge-tsv`, a "
        "BIDS folder, or the tables of AIBL or OASIS-3 (default: those in ROOT); or a table with "
        "one row for each person (subject, label)",
    )
    parser.add_argument(
        "--subject-pattern",
        default="",
        metavar="REGEX",
        help="what of a subject's name is the person: the first group, '(OAS1_\\d+)_MR\\d+'; a "
        "group named session is the session (default: the names of ADNI, OASIS and BIDS are known)",
    )
    parser.add_argument(
        "--label-column",
        default="",
        metavar="NAME",
        help="column of participants.tsv, or of a table of scans, with the labels (default: the "
        "usual ones)",
    )
    parser.add_argument(
        "--label-map",
        type=label_map,
        default=(),
        metavar="HC=NC,...",
        help="what words of the tables stand for (default: known words only)",
    )
    parser.add_argument(
        "--nan", choices=("error", "zero"), default="error", help="NaN voxels (default: error)"
    )
    parser.add_argument(
        "--unlike",
        choices=get_args(Unlike),
        default="error",
        help="scans that are no heads like the others (default: error)",
    )
    parser.add_argument(
        "--assume", choices=("", "RAS"), default="", help="order of files without orientation"
    )


_RULE = {
    "horizon_months": ("--horizon", "time in which progressive MCI converts"),
    "tolerance_months": ("--tolerance", "how early and late visits may be"),
    "late_converters": ("--late-converters", "MCI that converts after the horizon"),
    "smc": ("--smc", "people with memory complaints (SMC)"),
    "ad": ("--ad", "scans of AD: whenever demented, or of those demented at their first visit"),
    "reverters": (
        "--reverters",
        "who was demented once and not later: exclude, or take the diagnosis at the visit",
    ),
    "gaps": ("--gaps", "visits without a diagnosis between two equal ones"),
    "other_dementia": ("--other-dementia", "people whose dementia has another cause (OD)"),
}
"""Option and meaning of what can be chosen in the rule of the labels."""


def _add_rule(parser: ArgumentParser) -> None:
    """How diagnoses over time become labels."""
    kinds, defaults = get_type_hints(LabelRule), LabelRule()
    for name, (option, what) in _RULE.items():
        default, choices = getattr(defaults, name), get_args(kinds[name]) or None
        parser.add_argument(
            option,
            dest=name,
            type=str if choices else float,
            choices=choices,
            metavar=None if choices else "MONTHS",
            default=default,
            help=f"{what} (default: {default})",
        )


def _add_out(parser: ArgumentParser, name: str) -> None:
    default = _OUT / name
    parser.add_argument("--out", type=Path, default=default, help=f"file (default: {default})")


def _add_cohort(parser: ArgumentParser) -> None:
    """Who is in a synthetic cohort, and what is there to see."""
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


def _add_variety(parser: ArgumentParser) -> None:
    """How a synthetic cohort is written, and what it has beside its diagnoses."""
    parser.add_argument(
        "--layout",
        choices=get_args(SynthLayout),
        default="ida",
        help="how the files lie (default: ida); aibl, oasis1, oasis3: as that study gives them "
        "away; dicom: as a hospital does (needs SimpleITK)",
    )
    parser.add_argument(
        "--courses",
        action="store_true",
        help="add one subject with MCI for each course over time that the label rule knows",
    )
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="another hospital, for external validation: a site of its own, older people, other "
        "scanners",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="to try `prepare` on: L2 with face, neck and a stronger bias field, the head tilted "
        "and shifted; truth/truth.tsv has the transform",
    )
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


def _subjects(text: str) -> tuple[tuple[Diagnosis, int], ...]:
    if text.isdigit():
        text = f"AD={int(text) // 2},NC={int(text) - int(text) // 2}"
    counts: list[tuple[Diagnosis, int]] = []
    for part in text.split(","):
        name, _, count = part.partition("=")
        known = [group for group in GROUPS if group == name.strip()]
        if not known or not count.strip().isdigit():
            raise ArgumentTypeError(
                f"{part!r} is not DIAGNOSIS=NUMBER with a diagnosis of {', '.join(GROUPS)}"
            )
        counts.append((known[0], int(count)))
    return tuple(counts)


def _synth(options: Namespace) -> int:
    from .synth import CohortSpec, generate

    spec = CohortSpec(
        subjects=options.subjects,
        resolution_mm=options.resolution,
        difficulty="L2" if options.raw else options.difficulty,
        seed=options.seed,
        visits=options.visits,
        site_bias=options.site_bias,
        layout=options.layout,
        courses=options.courses,
        elsewhere=options.elsewhere,
        raw=options.raw,
    )
    with progress_bar("scans") as advance:
        summary = generate(options.out, spec, workers=options.workers, progress=advance)
    state = "already complete" if summary.already_complete else "written"
    size = summary.total_bytes / 1e6
    show(f"{summary.folder}: {state}, {summary.files} files, {size:.1f} MB; truth in truth/")
    return 0


def _prepare(options: Namespace) -> int:
    from .prepare.cohort import TABLE, find, prepare  # imports matplotlib, which takes a second
    from .prepare.one_scan import Settings

    if options.root.is_dir():
        refuse_inside(options.root, options.out, "OUT")
    with progress_bar("DICOM folders") as advance:
        found = find(
            options.root,
            None if options.layout == "auto" else options.layout,
            Names(options.subject_pattern, options.label_column, options.label_map),
            options.out,
            collection_csv=options.collection_csv,
            diagnosis_csv=options.diagnosis_csv,
            progress=advance,
        )
    show(f"{len(found.records)} scans to prepare, {found.left_out} not wanted")
    for note in found.notes:
        show(f"note: {note}")
    if not found.records:
        show(listing(found.problems))
        raise DataError(
            "NOTHING_USED",
            "no scan is left to prepare",
            str(options.root),
            "give T1-weighted scans, or correct the names of the series in the table",
        )
    leniency = _leniency(options)
    with progress_bar("scans") as advance:
        done = prepare(
            options.out,
            found.records,
            Settings(options.resolution, options.strip, leniency),
            workers=options.workers,
            progress=advance,
        )
    problems = [
        Problem(p.code, p.detail, p.action, p.record.path, p.record.subject, p.record.image_id)
        for p in done
        if p.code
    ]
    if problems or found.problems:
        show(listing([*found.problems, *problems]))
    again = sum(one.again for one in done)
    show(f"prepared {len(done) - len(problems)} ({again} of them before), failed {len(problems)}")
    show(f"look at: {options.out / 'quality.html'}; table: {options.out / TABLE}")
    if found.diagnoses is not None:
        show(f"give the diagnoses again: --diagnosis-csv {found.diagnoses}")
    return 1 if problems or found.problems else 0


def _check(options: Namespace) -> int:
    refuse_inside(options.root, options.out, "--out")
    manifest, problems = options.out / "manifest.tsv", options.out / "problems.tsv"
    store = options.out / "checks.json"
    for path in (manifest, problems):
        _refuse_overwriting(path, store.exists() or options.force)
    with progress_bar("files") as advance:
        found = _survey(options, options.task, store, advance)
    write_manifest(manifest, found.records)
    write_problems(problems, found)
    people, shared = options.out / "demographics.tsv", options.out / "shareable.json"
    write_demographics(people, found.records)
    write_shareable(shared, found.records, options.task, asdict(_rule(options)))
    show(found.summary())
    if found.problems:
        show(listing(found.problems))
    show_groups(demographics(found.records), p_values(found.records))
    written = [manifest, problems, people, shared]
    if found.records:
        write_montage(options.out / "montage.png", found.records, store, _leniency(options))
        written.append(options.out / "montage.png")
    show(f"report: {', '.join(map(str, written))}")
    refuse_nothing(found)
    return 1 if found.problems else 0


def _read_unchecked(options: Namespace, task: str) -> Survey:
    refuse_inside(options.root, options.out, "--out")
    found = _survey(options, task, None)
    show(found.summary())
    return found


def _survey(
    options: Namespace,
    task: str,
    store: Path | None,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    return survey(
        options.root,
        TASKS[task],
        store,
        layout=None if options.layout == "auto" else options.layout,
        rule=_rule(options),
        leniency=_leniency(options),
        collection_csv=options.collection_csv,
        diagnosis_csv=options.diagnosis_csv,
        names=Names(options.subject_pattern, options.label_column, options.label_map),
        unlike=options.unlike,
        progress=progress,
    )


def _leniency(options: Namespace) -> Leniency:
    return Leniency(nan=options.nan, assume=options.assume)


def _rule(options: Namespace) -> LabelRule:
    return LabelRule(**{name: getattr(options, name) for name in _RULE})


def _manifest(options: Namespace) -> int:
    _refuse_overwriting(options.out, options.force or _is_unchecked(options.out))
    found = _read_unchecked(options, options.task)
    write_manifest(options.out, found.records)
    show_groups(demographics(found.records), p_values(found.records))
    show(f"manifest: {options.out}")
    refuse_nothing(found)
    return 1 if found.problems else 0


def _join(options: Namespace) -> int:
    _refuse_overwriting(options.out, options.force)
    found: dict[str, list[ScanRecord]] = {}
    for name, root in options.cohorts:
        refuse_inside(root, options.out, "--out")
        one = survey(root, TASKS[options.task], None, rule=_rule(options))
        show(f"cohort {name}:\n{one.summary()}")
        refuse_nothing(one)
        found[name] = [*found.get(name, ()), *one.records]
    rows = joined(found, TASKS[options.task])
    write_joined(options.out, rows)
    show(f"{len(rows)} scans of {len(found)} cohorts: {options.out}, to be given as ROOT")
    return 0


def _refuse_overwriting(path: Path, allowed: bool) -> None:
    if path.exists() and not allowed:
        raise FolderError(
            "OUT_EXISTS",
            "a file that this command did not write is there already",
            str(path),
            "give another --out, or --force to replace it",
        )


def _is_unchecked(path: Path) -> bool:
    """Whether a manifest is there in which nothing would be lost: it has no content hashes."""
    try:
        return not any(record.sha256 for record in read_manifest(path))
    except (OSError, ValueError, DataError):
        return False


def _split(options: Namespace) -> int:
    old = load_split(options.extend) if options.extend else None
    tasks = list(dict.fromkeys(options.task or (old and old.tasks) or ["ad_nc"]))
    if old is not None and old.tasks and {*tasks} != {*old.tasks}:
        raise SplitError(
            "OTHER_TASKS",
            f"the split serves {old.task}, --task asks for {'+'.join(tasks)}",
            str(options.extend),
            "leave --task away, or make a new split: all its subjects would join training",
        )
    surveys = {}
    for task in tasks:
        if len(tasks) > 1:
            show(f"task {task}:")
        surveys[TASKS[task]] = _read_unchecked(options, task)
        refuse_nothing(surveys[TASKS[task]])
    records = [record for found in surveys.values() for record in found.records]
    if old is not None:
        split = extend_split(old, records)
    else:
        by_task = {task: found.records for task, found in surveys.items()}
        made = make_split(
            records,
            options.val,
            options.test,
            options.seed,
            folds=options.folds,
            leave_out=options.leave_out,
            classes=rarest_classes(by_task) if len(tasks) > 1 else None,
        )
        split = replace(made, task="+".join(tasks), rule=asdict(_rule(options)))
    save_split(options.out, split)
    sizes = [f"{name} {len(getattr(split, name))}" for name in SPLITS if getattr(split, name)]
    sizes += [f"fold {n} {len(fold)}" for n, fold in enumerate(split.folds)]
    show(f"split: {options.out}: {', '.join(sizes)} subjects, stratified on {split.stratified_on}")
    return 1 if any(found.problems for found in surveys.values()) else 0
