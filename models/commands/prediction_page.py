"""One page about scans that were classified: what was said, how far to trust it, and why not."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from models.reference import FEW
from models.report import html
from models.tasks import UNITS, is_number, title_of

if TYPE_CHECKING:
    from models.commands.predict_scans import Answer, Trained


def write_page(path: Path, trained: "Trained", answers: Sequence["Answer"]) -> Path:
    """Write the page, which opens without network, and return its path."""
    names = trained.class_names
    title = f"{len(answers)} scan{'s' * (len(answers) > 1)}, {title_of(trained.task)}"
    good = [said for said in answers if not said.problem]
    bad = [said for said in answers if said.problem]
    parts = [
        ("Not a diagnosis", _about(trained)),
        ("Results", html.table([_row(said, names) for said in good])),
        ("Refused", html.table([{"scan": s.scan.name, "why": s.problem} for s in bad])),
        *((said.scan.name, _one(said, names)) for said in good),
    ]
    path.write_text(html.page(title, parts), encoding="utf-8")
    return path


def _about(trained: "Trained") -> str:
    own, reference = trained.preprocessing, trained.reference
    size = " x ".join(map(str, own["spatial_shape"]))
    several = f"{len(trained.members)} networks say on average that were"
    whose = several if trained.others else "a network says that was"
    gives = f"knows the classes {', '.join(trained.class_names)} and gives one of them"
    if is_number(trained.class_names):
        gives = f"gives a number, {trained.class_names[0]},"
    text = (
        f"This is what {whose} trained for research. It {gives} to everybody, whatever else they "
        f"have. It was trained on {own['profile']} scans, brought to {size} voxels of "
        f"{own['spacing_mm']:g} mm"
    )
    if reference is None:
        return html.note(f"{text}. The checkpoint does not know more of them: train it again.")
    age = reference.extremes.get("age")
    ages = f", aged {age[0]:.0f} to {age[1]:.0f}" if age else ""
    few = ", too few to trust it" if reference.calibrated_on < FEW else ""
    fields = " and ".join(f"{tesla:g}" for tesla in reference.field_strengths)
    # of several networks each has its own training and validation scans
    one, of_first = ("it", "") if not trained.others else ("the first", " for the first of them")
    text = f"{text}: {reference.counted}{of_first}{ages}{f', at {fields} T' if fields else ''}"
    if reference.error is not None:
        (name,) = trained.class_names
        text += (
            f". On {reference.calibrated_on} validation scans{few.replace(' it', ' them,')} {one} "
            f"was wrong by {reference.error:.1f} {UNITS[name]} on average."
        )
        if trained.task == "age" and not few:
            text += " corrected gap: told minus true age, beyond what it told wrong at that age."
        return html.note(text)
    return html.note(
        f"{text}. Probabilities are "
        f"calibrated on {reference.calibrated_on} validation scans{of_first} (temperature "
        f"{reference.temperature:.2f}{few}), and hold where {trained.class_names[-1]} is as "
        "frequent as there."
    )


def _in_words(name: str) -> str:
    """What a quantity is, for people who do not know the tables."""
    if name.startswith("intensity_p"):
        return f"{name.removeprefix('intensity_p')}th percentile of the grey levels"
    return {
        "head_ml": "volume of the head (ml)",
        "voxel_mm": "size of the voxels (mm)",
        "features": "distance from the training scans",
    }.get(name, name.replace("_", " "))


def _row(said: "Answer", names: Sequence[str]) -> dict[str, object]:
    return {
        "scan": said.scan.name,
        **_told(said, names),
        "outside of what was trained on": ", ".join(map(_in_words, said.outside)) or "nothing",
        "notes": "; ".join(said.notes),
    }


def _told(said: "Answer", names: Sequence[str]) -> dict[str, object]:
    """What is said of a scan, by column."""
    ends = said.spread or ()
    if is_number(names):
        unit = UNITS[names[0]]
        found: dict[str, object] = {names[0]: f"{said.outputs[0]:.1f} {unit}"}
        if said.gap is not None:
            found["true"] = f"{said.scan.age:.1f} {unit}"
            found["corrected gap"] = f"{said.gap:+.1f} {unit}"
        return found | ({"the networks": " to ".join(f"{v:.1f}" for v in ends)} if ends else {})
    values = said.calibrated or said.outputs
    found = {f"P({name})": value for name, value in zip(names, values)}
    return found | ({"the networks": " to ".join(f"{p:.3f}" for p in ends)} if ends else {})


def _one(said: "Answer", names: Sequence[str]) -> str:
    outside = "".join(
        f"<li>{escape(_in_words(name))}: {escape(what)}</li>" for name, what in said.outside.items()
    )
    text = ""
    if outside:
        text += html.note("Outside of the range of the training scans:") + f"<ul>{outside}</ul>"
        text += html.note("What the network says of such a scan has not been tested.")
    return text + (html.picture(said.picture) if said.picture else "")
