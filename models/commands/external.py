"""``python -m models test --ckpt_path BEST --cohort ROOT``: another cohort as the test set.

All people of the cohort are tested on, none may have been trained on. Nothing is chosen on it:
weights, threshold and temperature are those of the checkpoint.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader

from datamodules.cache import ScanDataset
from datamodules.checks import kept_reports
from datamodules.errors import DataError, ProblemsError, SplitError
from datamodules.labels import TASKS
from datamodules.montage import write_montage
from datamodules.nifti import STRICT
from datamodules.profiles import choose_profile
from datamodules.progress import progress_bar
from datamodules.records import ScanRecord, write_manifest
from datamodules.report import first_scans, write_demographics
from datamodules.sources import LAYOUTS, Names
from datamodules.sources.people import label_map
from datamodules.survey import Survey, refuse_inside, refuse_nothing, survey, write_problems
from datamodules.unlike import Unlike
from models.calibration import predictive_values
from models.card import write_card_of_folds
from models.commands.cohort_tables import (
    at_threshold,
    beside_internal,
    by_group,
    calibration_rows,
    shift_rows,
)
from models.commands.predict_scans import CKPT_HELP, Trained, load_all, trained_likeness
from models.drawing import save_figures
from models.environment import save_environment
from models.errors import UseError
from models.predictions import Prediction, table_rows, told
from models.reference import FEW, corrected_gap, intensities, scores_and_features
from models.results import load_metrics, run_folder, save_result, scans_hash, writable
from models.scores import evaluate, intervals, not_learnt
from models.tables import read_table, write_table
from models.tasks import is_number
from models.transfer import is_among

_DIGITS = 6
_SHIFTED = 0.2  # share of scans outside of a range that is worth a line


def main(arguments: list[str]) -> int:
    """Run the command."""
    options = _parser().parse_args(arguments)
    trained = load_all(options.ckpt_path)
    out = options.out or run_folder(options.ckpt_path) / "external" / options.cohort.resolve().name
    refuse_inside(options.cohort, out, "--out")
    writable(out)
    found = _survey(options, trained, out)
    records = _tested(found, trained, options.eval_visits, options.cohort)
    validate_on(trained, records, out, options)
    save_environment(out)
    print(f"written to {out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models test",
        description="External validation: all people of another cohort are tested on. No "
        "configuration is needed: the checkpoint knows how its scans were prepared.",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", required=True, type=Path, help=CKPT_HELP)
    parser.add_argument("--cohort", required=True, type=Path, help="folder or table of the cohort")
    parser.add_argument("--out", type=Path, help="default: RUN/external/NAME of the cohort")
    parser.add_argument("--layout", choices=("auto", *LAYOUTS), default="auto")
    parser.add_argument("--collection_csv", type=Path)
    parser.add_argument("--diagnosis_csv", type=Path)
    parser.add_argument("--subject_pattern", default="")
    parser.add_argument("--label_column", default="")
    parser.add_argument("--label_map", type=label_map, default=(), metavar="HC=NC,...")
    parser.add_argument(
        "--rename",
        default="",
        metavar="PREFIX",
        help="put this before all names of people: they are others than those of the same names",
    )
    parser.add_argument(
        "--unlike", choices=get_args(Unlike), default="error", help="scans that are no such heads"
    )
    parser.add_argument("--eval_visits", choices=("baseline", "all"), default="baseline")
    parser.add_argument("--on_bad", choices=("error", "skip"), default="error")
    parser.add_argument("--batch_size", type=int, default=6)
    parser.add_argument(
        "--prevalence",
        type=float,
        default=0.1,
        help="share of the last class where PPV and NPV are to hold (default: 0.1)",
    )
    return parser


def _survey(options: argparse.Namespace, trained: Trained, out: Path) -> Survey:
    task = TASKS[trained.task]
    with progress_bar("files") as advance:
        found = survey(
            options.cohort,
            task,
            out / "checks.json",
            layout=None if options.layout == "auto" else options.layout,
            collection_csv=options.collection_csv,
            diagnosis_csv=options.diagnosis_csv,
            names=Names(options.subject_pattern, options.label_column, options.label_map),
            unlike=options.unlike,
            progress=advance,
        )
    renamed = [replace(r, subject=f"{options.rename}{r.subject}") for r in found.records]
    found = replace(found, records=renamed)
    write_montage(out / "montage.png", found.records, out / "checks.json", STRICT)
    write_manifest(out / "manifest.tsv", found.records)
    write_problems(out / "problems.tsv", found)
    write_demographics(out / "demographics.tsv", found.records)
    print(found.summary())
    if found.problems and options.on_bad == "error":
        report = str(out / "problems.tsv")
        raise ProblemsError(found.problems, str(options.cohort), report)
    refuse_nothing(found)
    return found


def _tested(found: Survey, trained: Trained, visits: str, where: Path) -> list[ScanRecord]:
    """The scans to test on, if none of them and none of their people was trained on."""
    profile, wanted = choose_profile("auto", found.records), trained.preprocessing["profile"]
    if profile != wanted:
        raise DataError(
            "OTHER_INPUT",
            f"the scans of the cohort are {profile}, the network was trained on {wanted} ones",
            str(where),
            "prepare the cohort as the scans that the network was trained on",
        )
    used = [record for record in found.records if record.used]
    refuse_trained_on(used, trained, where)
    records = used if visits == "all" else first_scans(used)
    return sorted(records, key=lambda record: (record.subject, *record.order))


def refuse_trained_on(records: Sequence[ScanRecord], trained: Trained, where: Path) -> None:
    """Refuse people, files and pictures that the network has seen in training.

    Raises:
        SplitError: ``LEAK``, with their names.
        UseError: the checkpoint does not know whom it was trained on.
    """
    if not trained.people:
        raise UseError(
            "The checkpoint does not say whom it was trained on, so it cannot be told that nobody "
            "of the cohort was. Train again with `python -m models fit`."
        )
    people = [record.subject for record in records if is_among(record.subject, trained.people)]
    scans = [
        f"{record.image_id} of {record.subject}"
        for record in records
        if {record.sha256[:16], record.picture} & trained.files
    ]
    names = sorted(set(people)) or scans
    if people and not scans:
        raise SplitError(
            "LEAK",
            f"{len(names)} people of the cohort have the names of some who were trained on "
            f"({', '.join(names[:5])}), and none of their scans was",
            str(where),
            "leave them out if they are the same people; if another hospital numbers its own so, "
            "put something before the names: --rename HOSPITAL_",
        )
    if names:
        what = "people" if people else "scans, under other names,"
        raise SplitError(
            "LEAK",
            f"{len(names)} {what} of the cohort were trained on: {', '.join(names[:5])}",
            str(where),
            "leave them out of the cohort: a result on them would prove nothing",
        )


def validate_on(
    trained: Trained, records: Sequence[ScanRecord], out: Path, options: argparse.Namespace
) -> None:
    """Ask the network about the scans and write everything that is said about it."""
    scores, features, levels = _looked_at(trained, records, options.batch_size)
    reference = trained.reference
    references = [one.reference for one in trained.members if one.reference]
    each = [told(own, one.scale).numpy() for one, own in zip(trained.members, scores)]
    raw, names, number = np.mean(each, axis=0), trained.class_names, is_number(trained.class_names)
    labels = np.array([r.target if number else r.label for r in records])
    tempered = [] if number else [r.calibrated(s).numpy() for r, s in zip(references, scores)]
    calibrated = np.mean(tempered, axis=0) if len(tempered) == len(each) else raw
    people = [record.subject for record in records]
    internal = _internal(options.ckpt_path)
    external = evaluate(raw, labels)
    bounds = intervals(raw, labels, people)
    predictions = [
        Prediction(r.subject, r.image_id, label, tuple(row))
        for r, label, row in zip(records, labels.tolist(), raw.tolist())
    ]
    likeness = _likeness(trained, records, out / "checks.json")
    last = calibrated[:, -1].tolist()
    more: list[dict[str, Any]] = [{"calibrated": round(value, _DIGITS)} for value in last]
    if number:
        gaps = [corrected_gap(references, *pair) for pair in zip(raw[:, 0], labels)]
        more = [{} if gap is None else {"corrected_error": gap} for gap in gaps]
    details = {
        record.image_id: columns | {"likeness": likeness.get(record.path, "")} | _about(record)
        for record, columns in zip(records, more)
    }
    write_table(table_rows(predictions, names, details), out / "predictions.tsv")
    if reference and len(names) == 2:
        place = float(np.mean([known.threshold for known in references]))
        called, ends = at_threshold(calibrated[:, 1], labels, people, place)
        external, bounds = external | called, bounds | ends
    rows = beside_internal(external, bounds, internal)
    if trained.others:
        alone = [evaluate(values, labels) for values in each]
        for row in rows:
            found = [values[row["metric"]] for values in alone if row["metric"] in values]
            row |= {"networks_from": min(found, default=""), "networks_to": max(found, default="")}
    write_table(rows, out / "internal_and_external.tsv")
    write_table(by_group(records, raw, labels, names), out / "groups.tsv")
    if len(names) == 2:
        rows_of = calibration_rows(raw[:, 1], calibrated[:, 1], labels, people)
        write_table(rows_of, out / "calibration.tsv")
        ppv, npv = predictive_values(
            external["sensitivity"], external["specificity"], options.prevalence
        )
        external |= {"ppv": ppv, "npv": npv}
    shift = shift_rows(reference, records, features, levels) if reference else []
    write_table(shift, out / "shift.tsv")
    metrics = {f"external/{name}": value for name, value in external.items()}
    for name, (low, high) in bounds.items():
        metrics |= {f"external/{name}_low": low, f"external/{name}_high": high}
    settings = {
        "cohort": options.cohort.resolve().name,
        "scans": scans_hash(predictions),
        **({} if number else {"prevalence": options.prevalence}),
        "threshold_of": reference.calibrated_on if reference and not number else 0,
        **trained.preprocessing,
    }
    save_result(out / "external_metrics.json", metrics, settings)
    save_figures(predictions, names, out / "external_metrics.json")
    _print(rows, shift, len(records), len(set(people)))
    if said := not_learnt(raw, labels, names):
        print(said)
    if options.ckpt_path.is_dir():
        write_card_of_folds(options.ckpt_path)  # it names the tests of other cohorts
    if reference and not number and reference.calibrated_on < FEW:
        print(f"the threshold is that of {reference.calibrated_on} validation scans: chance")


def _likeness(trained: Trained, records: Sequence[ScanRecord], store: Path) -> dict[str, float]:
    """How like the training scans each is, by path; nothing where that is not known."""
    found = {}
    for path, report in kept_reports(store, STRICT, [record.path for record in records]).items():
        if (value := trained_likeness(trained.reference, report)) is not None:
            found[path] = round(value, 3)
    return found


@torch.no_grad()
def _looked_at(
    trained: Trained, records: Sequence[ScanRecord], batch_size: int
) -> tuple[list[torch.Tensor], torch.Tensor, list[dict[str, float]]]:
    """Scores of each network; features that the first one sees; intensities."""
    voxel_ml = trained.preprocessing["spacing_mm"] ** 3 / 1000
    scores: list[list[torch.Tensor]] = [[] for _ in trained.members]
    features = []
    levels: list[dict[str, float]] = []
    for batch in DataLoader(ScanDataset(records, trained.steps()), batch_size=batch_size):
        both = [scores_and_features(one.network, batch["image"]) for one in trained.members]
        for own, (given, _) in zip(scores, both):
            own.append(given)
        features.append(both[0][1])
        levels += [intensities(i[0].numpy(), voxel_ml) for i in batch["image"]]
    # double: a probability of 1 - 1e-9 is none of 1
    return [torch.cat(own).double() for own in scores], torch.cat(features), levels


def _internal(ckpt_path: Path) -> dict[str, float]:
    """Metrics of the run's own test; nothing if it was not tested."""
    if ckpt_path.is_dir():
        rows = read_table(ckpt_path / "folds.tsv")
        ends = {"": "vote", "_low": "vote_low", "_high": "vote_high"}
        return {r["metric"] + e: float(r[c]) for r in rows for e, c in ends.items() if r[c]}
    path = run_folder(ckpt_path) / "test_metrics.json"
    if not path.is_file():
        return {}
    return {name.removeprefix("test/"): value for name, value in load_metrics(path).items()}


def _about(record: ScanRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in ("session", "age", "sex", "site", "scanner")}
    values["field_strength"] = record.field_strength
    return {name: "" if value is None else value for name, value in values.items()}


def _print(
    rows: Sequence[Mapping[str, Any]], shift: Sequence[Mapping[str, Any]], scans: int, people: int
) -> None:
    print(f"tested on {scans} scans of {people} people, none of them trained on")
    for row in rows:
        ends = (f"{row[k]:.3f}" if row[k] != "" else "" for k in ("external_low", "external_high"))
        inside = f"{row['internal']:.3f}" if row["internal"] != "" else "-"
        interval = " to ".join(end for end in ends if end)
        print(
            f"{row['metric']:>20}  internal {inside:>6}  external {row['external']:.3f}  {interval}"
        )
    for row in shift:
        if row["outside"] > _SHIFTED:
            share = f"{row['outside']:.0%} of the scans"
            print(f"shift: {share} outside of the training range: {row['input']}")
