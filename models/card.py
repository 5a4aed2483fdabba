"""A model card (Mitchell et al. 2019), filled from what a run has recorded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.folds import checkpoints_of
from models.reference import FEW, Reference, from_checkpoint
from models.results import load_metrics, load_settings, run_folder
from models.tables import read_table
from models.tasks import UNITS, classes_of, is_number
from models.transfer import KEY, read_checkpoint

_OF_CLASSES = ("accuracy", "balanced_accuracy", "auroc", "sensitivity", "specificity", "brier")
_SHOWN = (*_OF_CLASSES, "mae", "rmse", "r2", "pearson_r", "bias", "bias_slope")
_UNKNOWN = "not recorded"
_NO_WEIGHTS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm


def card(ckpt_path: Path) -> list[tuple[str, str]]:
    """Headings and texts about the network of a checkpoint; plain text.

    Args:
        ckpt_path: of ``python -m models fit``; results are read from the run's folder.
    """
    checkpoint, run = read_checkpoint(ckpt_path), run_folder(ckpt_path)
    options = checkpoint.get("hyper_parameters", {})
    prepared: Mapping[str, Any] = checkpoint.get("ADNIDataModule", {}).get("preprocessing", {})
    reference = from_checkpoint(checkpoint)
    names = classes_of(options["task"])
    gives = f"one of the classes {', '.join(names)}"
    if is_number(names):
        gives = f"a number, {names[0]} in {UNITS[names[0]]},"
    return [
        ("Model", _model(options, checkpoint, names)),
        (
            "Intended use",
            "Research. No diagnosis, no treatment, no screening: it was tested for none of them. "
            f"It gives {gives} to everybody, whatever else they have.",
        ),
        ("Input", _input(prepared)),
        ("Training data", _data(reference, checkpoint)),
        ("Evaluation: the run's own held-out people", _internal(run)),
        ("Evaluation: other cohorts", _external(run)),
        ("Groups", _groups(run)),
        *_validated(reference, names),
        (
            "Limits",
            "Intervals say what other held-out people would change, not what another training run "
            "or another scanner would. Maps show what raises "
            f"{'the number' if is_number(names) else 'a score'}, which need not be disease.",
        ),
    ]


def card_of_folds(folder: Path) -> list[tuple[str, str]]:
    """The same about the runs of ``python -m models folds``, which are averaged to one model."""
    found = checkpoints_of(folder)
    parts = dict(card(next(iter(found.values()))))
    each = ", ".join(f"{name} ({path.relative_to(folder)})" for name, path in found.items())
    model = f"The mean of what {len(found)} networks say: {each}. Each: {parts['Model']}"
    rows = {row["metric"]: row for row in read_table(folder / "folds.tsv")}
    columns = {"": "vote", "_low": "vote_low", "_high": "vote_high"}
    values = {n + end: float(r[c]) for n, r in rows.items() for end, c in columns.items() if r[c]}
    tested = "; ".join(
        f"{name.replace('_', ' ')} {_with_interval(values, name)}, the networks one by one "
        f"{float(row['mean']):.3f} +- {float(row['sd']):.3f}"
        for name, row in rows.items()
        if name in _SHOWN and row["sd"]
    )
    own = {"Model": model, "Evaluation: the run's own held-out people": f"{tested}."}
    own["Evaluation: other cohorts"] = _external(folder)
    for name in ("Training data", "Calibration", "Error"):
        if name in parts:
            own[name] = f"Of the first network: {parts[name]}"
    return list((parts | own).items())


def write_card_of_folds(folder: Path) -> None:
    """Write ``model_card.md``, of the networks of all folds as one."""
    text = as_markdown("Several networks as one", card_of_folds(folder))
    (folder / "model_card.md").write_text(text, encoding="utf-8")


def as_markdown(title: str, parts: list[tuple[str, str]]) -> str:
    """A page in Markdown."""
    return f"# {title}\n" + "".join(f"\n## {name}\n\n{text}\n" for name, text in parts)


def _model(options: Mapping[str, Any], checkpoint: Mapping[str, Any], names: Sequence[str]) -> str:
    weights = sum(
        value.numel()
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("network.") and not name.endswith(_NO_WEIGHTS)
    )
    recipe = ", ".join(
        f"{name.replace('_', ' ')} {options[name]}"
        for name in ("optimizer", "learning_rate", "lr_schedule", "label_smoothing", "dropout")
        # a number's label is not smoothed
        if name in options and not (name == "label_smoothing" and is_number(names))
    )
    return (
        f"3D-ResAttNet-{options['depth']} (a reconstruction), {weights:,} weights; "
        f"{recipe}; epoch {checkpoint.get('epoch', _UNKNOWN)} of the run, chosen on the validation "
        "scans."
    )


def _input(prepared: Mapping[str, Any]) -> str:
    if not prepared:
        return f"Preparation: {_UNKNOWN}."
    size = " x ".join(map(str, prepared["spatial_shape"]))
    middle = prepared.get("middle_mm")
    where = f", around {tuple(middle)} mm of their common space" if middle else ""
    return (
        f"T1-weighted MRI, {prepared['profile']}; {size} voxels of {prepared['spacing_mm']:g} mm"
        f"{where}; the head at mean 0 and standard deviation 1, clipped at 3, everything else 0."
    )


def _data(reference: Reference | None, checkpoint: Mapping[str, Any]) -> str:
    people = f"{len(checkpoint.get(KEY, ()))} people"
    if reference is None:
        return f"{people}; more is {_UNKNOWN}."
    age = reference.extremes.get("age")
    ages = f", aged {age[0]:.0f} to {age[1]:.0f}" if age else ""
    fields = " and ".join(f"{tesla:g}" for tesla in reference.field_strengths)
    tesla = f", at {fields} T" if fields else ""
    scans = "" if is_number(reference.class_names) else "scans: "
    return f"{people}; {scans}{reference.counted}{ages}{tesla}. Their hashes are in the checkpoint."


def _internal(run: Path) -> str:
    path = run / "test_metrics.json"
    if not path.is_file():
        return "Not tested: `python -m models test`."
    values = {k.removeprefix("test/"): v for k, v in load_metrics(path).items()}
    lines = [
        f"{name.replace('_', ' ')} {_with_interval(values, name)}"
        for name in _SHOWN
        if name in values
    ]
    beside = (load_settings(run / "test_baseline.json") or {}).get("verdict", "")
    text = "; ".join(lines) + " (95 % intervals, where people are enough for one)."
    return f"{text} {beside}".rstrip()


def _with_interval(values: Mapping[str, Any], name: str) -> str:
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    text = f"{float(values[name]):.3f}"
    return text if low is None or high is None else f"{text} ({low:.3f} to {high:.3f})"


def _numbers(row: Mapping[str, str], name: str) -> dict[str, float]:
    """The external value of a metric, and its ends where there are some."""
    columns = {"external": "", "external_low": "_low", "external_high": "_high"}
    return {name + end: float(row[c]) for c, end in columns.items() if row.get(c)}


def _external(run: Path) -> str:
    found = []
    for path in sorted((run / "external").glob("*/internal_and_external.tsv")):
        rows = {row["metric"]: row for row in read_table(path)}
        shown = [
            f"{name.replace('_', ' ')} {_with_interval(_numbers(rows[name], name), name)}"
            for name in _SHOWN
            if name in rows
        ]
        found.append(f"{path.parent.name}: {'; '.join(shown)}.")
    return " ".join(found) or "None: `python -m models test --cohort ROOT`."


def _groups(run: Path) -> str:
    kinds: list[str] = []
    for path in sorted((run / "external").glob("*/groups.tsv")):
        kinds += [row["by"] for row in read_table(path)]
    named = ", ".join(dict.fromkeys(kinds))
    return f"Compared by {named}; tables in the folder external." if named else "Not compared."


def _validated(reference: Reference | None, names: Sequence[str]) -> list[tuple[str, str]]:
    """What was found on the validation scans: a calibration, or the error of a number."""
    if is_number(names):
        return [] if reference is None else [("Error", _error(reference))]
    return [("Calibration", "None." if reference is None else _calibration(reference))]


def _error(reference: Reference) -> str:
    few = ", too few to trust it" if reference.calibrated_on < FEW else ""
    (name,) = reference.class_names
    text = (
        f"On {reference.calibrated_on} validation scans{few}: mean absolute error "
        f"{reference.error:.2f} {UNITS[name]}."
    )
    if reference.correction is None:
        return text
    _, slope = reference.correction
    return f"{text} For each more of the true {name} there, {abs(slope):.2f} too {_way(slope)}."


def _way(slope: float) -> str:
    return "little is told" if slope < 0 else "much is told"


def _calibration(reference: Reference) -> str:
    few = ", too few to trust them" if reference.calibrated_on < FEW else ""
    return (
        f"One temperature, {reference.temperature:.2f}, and one threshold, "
        f"{reference.threshold:.2f}, found on {reference.calibrated_on} validation scans{few}; "
        "they hold where the classes are as frequent as there."
    )
