"""``python -m models predict --ckpt_path BEST --scans WHAT``: scans that nobody has labelled.

The checkpoint knows how its scans were prepared and what they were like. Each scan is checked as
training data is, and refused by name where it is damaged or of another kind; the others go on.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import nibabel as nib
import numpy as np
import torch
from torch import Tensor

from datamodules.checks import FileReport, check_file
from datamodules.content import picture_hash
from datamodules.likeness import image as coarse_image
from datamodules.likeness import onto
from datamodules.nifti import BadFile, Leniency
from datamodules.records import ScanRecord
from datamodules.space import off_middle_mm
from datamodules.survey import cut_brains
from datamodules.transforms import fixed_transforms
from datamodules.unlike import Unlike, in_words
from models.commands.new_scans import NewScan, find_scans
from models.environment import save_environment
from models.errors import UseError
from models.folds import checkpoints_of
from models.maps import HiResCAM3D
from models.maps.native import masked, to_native
from models.predictions import Scale, told
from models.reference import (
    Noted,
    Reference,
    corrected_gap,
    from_checkpoint,
    intensities,
    noting,
)
from models.resattnet import OPTIONS, ResAttNet3D
from models.results import run_folder, writable
from models.tables import write_table
from models.tasks import UNITS, TaskName, classes_of, is_number
from models.transfer import KEY, is_among, read_checkpoint, scale_of

CKPT_HELP = "RUN/checkpoints/best.ckpt, or a folder of `folds`, whose networks are averaged"
_EMPTY = 0.05  # standard deviation of a prepared image, which is about 1 within the head
_ACTION = "prepare the scan as those that the network was trained on"


@dataclass(frozen=True)
class Trained:
    """A network as its checkpoint has it.

    Attributes:
        network: in evaluation mode, on the CPU.
        options: with which it was made.
        task: what it was trained for.
        preprocessing: how its scans were prepared.
        reference: what they were like; None: an older checkpoint does not know.
        people: hashes of those it was trained on, or one of the others.
        files: hashes of the files of their scans, and of the pictures in them.
        scale: of the number that it tells; None: it tells classes.
        others: networks of other folds, whose outputs are averaged with its own.
    """

    network: ResAttNet3D
    options: Mapping[str, Any]
    task: TaskName
    preprocessing: Mapping[str, Any]
    reference: Reference | None
    people: frozenset[str]
    files: frozenset[str]
    scale: Scale | None = None
    others: tuple["Trained", ...] = ()

    @property
    def members(self) -> tuple["Trained", ...]:
        """All networks."""
        return (self, *self.others)

    @property
    def class_names(self) -> tuple[str, ...]:
        """In the order of the scores; of a number, its name."""
        return classes_of(self.task)

    def steps(self) -> list[Any]:
        """The transforms that the training scans went through before augmentation."""
        own = self.preprocessing
        middle = own.get("middle_mm")
        return fixed_transforms(
            tuple(own["spatial_shape"]),
            own["spacing_mm"],
            own["profile"],
            None if middle is None else tuple(middle),
        )

    def prepare(self, path: Path) -> tuple[Tensor, Tensor]:
        """Image (1, D, H, W) and affine (4, 4) of a scan that was checked."""
        data: Any = {"image": str(path)}
        for step in self.steps():
            data = step(data)
        return data["image"], data["affine"]


@dataclass
class Answer:
    """What is said of one scan.

    Attributes:
        scan: the scan.
        problem: why nothing is said of it; empty: all below is known.
        outputs: probabilities of the classes, as the network gives them, or the number.
        calibrated: probabilities calibrated on validation scans; empty for a number.
        spread: lowest and highest probability of the last class, or number, over several networks.
        gap: told minus true age, beyond what is told wrong on average; None: not known.
        outside: what lies outside of the range of the training scans, by name.
        likeness: correlation with the mean of the training scans; None: not known.
        notes: warnings of the check.
        picture: file with the overlay.
    """

    scan: NewScan
    problem: str = ""
    outputs: list[float] = field(default_factory=list)
    calibrated: list[float] = field(default_factory=list)
    spread: tuple[float, float] | None = None
    gap: float | None = None
    outside: dict[str, str] = field(default_factory=dict)
    likeness: float | None = None
    notes: list[str] = field(default_factory=list)
    picture: Path | None = None


def load_all(path: Path) -> Trained:
    """Read a checkpoint, or all of a folder of ``python -m models folds``, as one model.

    Raises:
        UseError: see `load`; also networks that were not trained for one task on scans of one kind.
    """
    if not path.is_dir():
        return load(path)
    first, *rest = (load(checkpoint) for checkpoint in checkpoints_of(path).values())
    if any((one.task, one.preprocessing) != (first.task, first.preprocessing) for one in rest):
        raise UseError(f"The runs in {path} differ in task or preparation: they are no one model.")
    people, files = (
        frozenset().union(*(getattr(one, name) for one in (first, *rest)))
        for name in ("people", "files")
    )
    return replace(first, people=people, files=files, others=tuple(rest))


def load(ckpt_path: Path) -> Trained:
    """Read a checkpoint of ``python -m models fit``.

    Raises:
        UseError: it is none, or does not know how its scans were prepared.
    """
    checkpoint = read_checkpoint(ckpt_path)
    state = checkpoint.get("ADNIDataModule", {})  # by the class's name, as Lightning does
    given = checkpoint.get("hyper_parameters", {})
    if "preprocessing" not in state or "task" not in given:
        raise UseError(
            f"{ckpt_path} does not know how its scans were prepared: it was not written by "
            "`python -m models fit`, or by an older version. Train again, or test with --config."
        )
    classes, prefix = len(classes_of(given["task"])), "network."
    options = {"num_classes": classes} | {k: given[k] for k in OPTIONS if k in given}
    network = ResAttNet3D(**options)
    weights = checkpoint["state_dict"].items()
    network.load_state_dict({k.removeprefix(prefix): v for k, v in weights if prefix in k})
    files = (*state.get("trained_files", ()), *state.get("trained_pictures", ()))
    return Trained(
        network.eval(),
        options,
        given["task"],
        state["preprocessing"],
        from_checkpoint(checkpoint),
        frozenset(checkpoint.get(KEY, ())),
        frozenset(files),
        scale_of(checkpoint),
    )


def answer(
    trained: Trained,
    scan: NewScan,
    out: Path,
    leniency: Leniency,
    layer: str = "layer1",
    unlike: Unlike = "error",
) -> Answer:
    """Check and prepare one scan, ask the network, write overlay and map. Never raises for it."""
    said = Answer(scan)
    said.notes += [f"{name} {cell!r} was not read" for name, cell in scan.unread.items()]
    try:
        report = check_file(scan.path, leniency)
        if report.code:
            raise BadFile(report.code, report.detail, report.action)
        said.notes += [f"{code}: {detail}" for code, detail in report.warnings.items()]
        _refuse_other_kind(trained.preprocessing, report)
        _compare(trained.reference, said, report, unlike)
        image, affine = trained.prepare(scan.path)
        if not bool(image.isfinite().all()) or float(image.std()) < _EMPTY:
            raise BadFile("CONSTANT", "nothing is left of the scan when prepared", _ACTION)
        asked = [
            _ask(one.network, image, layer, len(trained.class_names) - 1) for one in trained.members
        ]
        _classify(trained, said, report, image, [noted for noted, _ in asked])
        _draw(trained, said, image, affine, out, [found for _, found in asked])
    except BadFile as bad:
        said.problem = f"{bad.code}: {bad.detail} -> {bad.action}"
    except (OSError, ValueError, RuntimeError) as error:
        said.problem = f"UNREADABLE: {type(error).__name__}: {error}"
    return said


def _refuse_other_kind(preprocessing: Mapping[str, Any], report: FileReport) -> None:
    profile, wants = preprocessing["profile"], preprocessing["profile"] == "stripped"
    if report.stripped and (report.stripped == "yes") is not wants:
        found, known = (
            ("heads with", "brains without") if wants else ("brains without", "heads with")
        )
        raise BadFile(
            "OTHER_INPUT",
            f"the scan is one of {found} skull, the network was trained on {known}",
            _ACTION,
        )
    middle = preprocessing.get("middle_mm")
    off = off_middle_mm(report.middle_mm, middle) if middle else 0.0
    if off:
        raise BadFile(
            "OTHER_INPUT",
            f"the middle of the scan is {off:.0f} mm from that of the space in which the network's "
            f"{profile} scans lay",
            "register the scan as those that the network was trained on",
        )


def _compare(reference: Reference | None, said: Answer, report: FileReport, unlike: Unlike) -> None:
    """Refuse what is no head like those that were trained on, or note it."""
    said.likeness = trained_likeness(reference, report)
    if reference is None or said.likeness is None or said.likeness >= reference.least:
        return
    detail = "no head like those that were trained on: "
    detail += in_words(said.likeness, reference.least)
    if unlike == "error":
        raise BadFile(
            "UNLIKE",
            detail,
            "look at it: orientation, axes, voxel size, contrast? To classify it all the same: "
            "--unlike use",
        )
    said.notes.append(f"UNLIKE: {detail}")


def trained_likeness(reference: Reference | None, report: FileReport) -> float | None:
    """Correlation of a scan with the mean of the training scans; None: not known."""
    if reference is None or reference.usual is None or not report.coarse:
        return None
    return onto(coarse_image(report.coarse), reference.usual.numpy())[0]


def _ask(network: ResAttNet3D, image: Tensor, layer: str, explained: int) -> tuple[Noted, Tensor]:
    """What a network says of a scan, and the map (D, H, W) of a class, in one forward pass."""
    with noting(network) as noted:
        found = HiResCAM3D(network, layer)(image[None], explained)
    return noted, found[0, 0]


def _classify(
    trained: Trained, said: Answer, report: FileReport, image: Tensor, each: Sequence[Noted]
) -> None:
    scan = said.scan
    said_by = torch.cat([told(n.scores, one.scale) for one, n in zip(trained.members, each)])
    said.outputs = said_by.mean(dim=0).tolist()
    seen = {report.sha256[:16], picture_hash(report.sample)} & trained.files
    if seen or is_among(scan.subject, trained.people):
        said.notes.append("TRAINED_ON: the network has seen this " + ("scan" if seen else "person"))
    shape, spacing = trained.preprocessing["spatial_shape"], trained.preprocessing["spacing_mm"]
    said.notes += [
        f"{problem.code}: {problem.detail}"
        for problem in cut_brains([_record(scan, report)], tuple(shape), spacing)
    ]
    known = [(one.reference, noted) for one, noted in zip(trained.members, each) if one.reference]
    if trained.scale is None and len(known) == len(each):
        said_by = torch.cat([reference.calibrated(noted.scores) for reference, noted in known])
        said.calibrated = said_by.mean(dim=0).tolist()
    if len(each) > 1:
        said.spread = float(said_by[:, -1].min()), float(said_by[:, -1].max())
    if len(known) < len(each):
        return
    if trained.task == "age" and scan.age is not None:
        said.gap = corrected_gap([reference for reference, _ in known], said.outputs[0], scan.age)
    levels = intensities(image[0].numpy(), spacing**3 / 1000)
    outside = [_outside(r, scan, report, levels, noted.features[0]) for r, noted in known]
    # of several networks, what all of them were trained without
    said.outside = {k: v for k, v in outside[0].items() if all(k in other for other in outside)}


def _outside(
    reference: Reference,
    scan: NewScan,
    report: FileReport,
    levels: Mapping[str, float],
    features: Tensor,
) -> dict[str, str]:
    """What of a scan lies outside of the range of the training scans, by name."""
    sizes = [float(size) for size in report.zooms.split()]
    found = reference.outside({"age": scan.age, **levels})
    for size in (min(sizes), max(sizes)):
        found |= reference.outside({"voxel_mm": size})
    known = reference.field_strengths
    if scan.field_strength is not None and known:
        near = min(known, key=lambda tesla: abs(tesla - (scan.field_strength or 0)))
        if abs(near - scan.field_strength) > 0.3:
            names = ", ".join(f"{tesla:g}" for tesla in known)
            found["field_strength"] = f"{scan.field_strength:g} T, trained on {names} T"
    far = reference.distance(features)
    if far > reference.limit:
        found["features"] = f"{far / reference.limit:.1f} times as far as any held-out scan"
    return found


def _record(scan: NewScan, report: FileReport) -> ScanRecord:
    return ScanRecord(
        subject=scan.subject,
        image_id=scan.name,
        path=str(scan.path),
        stripped=report.stripped,
        reach=report.reach,
    )


def _draw(
    trained: Trained,
    said: Answer,
    image: Tensor,
    affine: Tensor,
    out: Path,
    maps: Sequence[Tensor],
) -> None:
    """The overlay, and the map on the grid of the scan."""
    from models.overlay import save_unlabelled  # plotting libraries are slow to import

    names, voxels = trained.class_names, image[0].numpy()
    values = masked(torch.stack(list(maps)).mean(dim=0).numpy(), voxels)
    title = f"{said.scan.name}   |   the network: {shown(said, names)}"
    said.picture = out / f"{said.scan.name}_hirescam.png"
    save_unlabelled(voxels, values, np.asarray(affine, float), said.picture, title, names)
    there = to_native(values, np.asarray(affine, float), said.scan.path)
    nib.save(there, said.picture.with_suffix(".nii.gz"))


def shown(said: Answer, class_names: Sequence[str]) -> str:
    """What is said of the last class, calibrated where it can be, or the number, in words."""
    value, name = (said.calibrated or said.outputs)[-1], class_names[-1]
    form = ".1f" if is_number(class_names) else ".0%"
    ends = [format(end, form) for end in said.spread or ()]
    between = f" ({' to '.join(ends)} by the networks)" if ends else ""
    if is_number(class_names):
        return f"{name} {value:{form}}{between} {UNITS[name]}"
    return f"{value:{form}}{between} {name}"


def table_rows(answers: Sequence[Answer], class_names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each scan, with the same columns."""
    rows, several = [], any(said.spread for said in answers)
    gaps = any(said.gap is not None for said in answers)
    for said in answers:
        known = said.calibrated or said.outputs
        row: dict[str, Any] = {"scan": said.scan.name, "subject": said.scan.subject}
        if is_number(class_names):
            row |= {f"predicted_{class_names[0]}": known[0] if known else ""}
            if gaps:
                row |= {"age": "" if said.scan.age is None else said.scan.age}
                row |= {"corrected_gap": "" if said.gap is None else said.gap}
        else:
            row["predicted"] = class_names[int(np.argmax(known))] if known else ""
            for kind, values in (("p", said.outputs), ("calibrated", said.calibrated)):
                row |= {
                    f"{kind}_{n}": values[k] if values else "" for k, n in enumerate(class_names)
                }
        if several:
            ends = zip(("lowest", "highest"), said.spread or ("", ""))
            row |= {f"{kind}_{class_names[-1]}": value for kind, value in ends}
        row["likeness"] = "" if said.likeness is None else round(said.likeness, 3)
        row["outside"] = "; ".join(f"{name}: {what}" for name, what in said.outside.items())
        rows.append(
            row
            | {
                "notes": "; ".join(said.notes),
                "problem": said.problem,
                "path": str(said.scan.path),
            }
        )
    return rows


def main(arguments: list[str]) -> int:
    """Run the command; the exit code is 1 if a scan was refused."""
    parser = argparse.ArgumentParser(
        prog="python -m models predict",
        description="Classify scans that nobody has labelled. No configuration is needed: the "
        "checkpoint knows how its scans were prepared. (With --config instead of --scans: the test "
        "scans of a run.)",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", required=True, type=Path, help=CKPT_HELP)
    parser.add_argument(
        "--scans", required=True, type=Path, help="a NIfTI file, a folder, or a table with `path`"
    )
    parser.add_argument("--out", type=Path, help="folder of the results (default: RUN/new_scans)")
    parser.add_argument("--layer", default="layer1", help="of the network, for the map")
    parser.add_argument("--nan", choices=("error", "zero"), default="error")
    parser.add_argument("--assume", choices=("", "RAS"), default="")
    parser.add_argument(
        "--unlike", choices=get_args(Unlike), default="error", help="scans that are no such heads"
    )
    options = parser.parse_args(arguments)
    trained, scans = load_all(options.ckpt_path), find_scans(options.scans)
    try:
        HiResCAM3D(trained.network, options.layer)
    except ValueError as error:
        raise UseError(f"--layer: {error}") from error
    out = writable(options.out or _free(run_folder(options.ckpt_path) / "new_scans"))
    leniency = Leniency(nan=options.nan, assume=options.assume)
    answers = []
    for number, scan in enumerate(scans, 1):
        said = answer(trained, scan, out, leniency, options.layer, options.unlike)
        answers.append(said)
        print(f"{number} of {len(scans)}  {_line(said, trained.class_names)}", flush=True)
    write_table(table_rows(answers, trained.class_names), out / "predictions.tsv")
    from models.commands.prediction_page import write_page

    page = write_page(out / "predictions.html", trained, answers)
    save_environment(out)
    failed = sum(bool(said.problem) for said in answers)
    done = "given a number" if is_number(trained.class_names) else "classified"
    print(f"{len(answers) - failed} scans {done}, {failed} refused; {page}")
    return 1 if failed else 0


def _line(said: Answer, names: Sequence[str]) -> str:
    if said.problem:
        return f"{said.scan.name}: refused, {said.problem}"
    outside = f"; outside of what was trained on: {', '.join(said.outside)}" if said.outside else ""
    return f"{said.scan.name}: {shown(said, names)}{outside}"


def _free(folder: Path) -> Path:
    """The folder, or one with a number where there is something already."""
    number, path = 1, folder
    while path.exists() and any(path.iterdir()):
        number += 1
        path = folder.with_name(f"{folder.name}_{number}")
    return path
