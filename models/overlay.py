"""Pictures of maps over scans: slices through the head as PNG, and a page to click through."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from nibabel.processing import resample_to_output

from models import slices
from models.explained_scan import peak_mm
from models.findings import TITLES, WITHOUT_SIGN, Case, Findings, Map
from models.localisation import TOP, hottest
from models.maps.native import Array, head_mask, volume
from models.tasks import UNITS, is_number

DISPLAY_MM = 2.0
"""Voxel size of pictures: coarser scans are resampled, so that they do not look like bricks."""
_ALPHA = 0.65
_WIDE = 120  # letters of a title
_PAGE_WIDTH = 1200  # pixels, of the three slices of a page


def save_overlay(case: Case, one: Map, path: Path, class_names: Sequence[str]) -> None:
    """Draw a map over its scan in slices along three axes; a truth becomes a contour.

    Only the hottest ``TOP`` of the head is drawn, and its peak is marked. A sentence says how to
    read it, since a picture is often shown without its page.
    """
    _draw(
        case.image,
        one.values,
        case.affine,
        path,
        f"{case_title(case, class_names)}\n{map_title(case, one)}",
        meaning(case, class_names, one.method),
        truth=case.truth,
    )


def save_unlabelled(
    image: Array,
    values: Array,
    affine: Array,
    path: Path,
    title: str,
    class_names: Sequence[str],
) -> None:
    """Draw a map (D, H, W) over a scan of which the class is not known.

    Args:
        image: (D, H, W), prepared.
        values: map of the evidence for a class, or of what raises a number, within the head.
        affine: (4, 4) voxels to mm, of both.
        path: of the PNG.
        title: first line.
        class_names: of the task; the last one is explained.
    """
    name, shows = class_names[-1], evidence(class_names)
    what = f"HiResCAM, {shows}, {top_text(values, image)}"
    hot = f"raises the {name} told" if is_number(class_names) else f"speaks most for {name}"
    note = (
        f"Hot is what {hot} in this scan. The scale is the map's own, so there is always a hottest "
        "place; it is no sign of disease by itself."
    )
    empty = "" if values.any() else f"{shows}: nothing was found"
    _draw(image, values, affine, path, f"{title}\n{empty or what}", note)


def save_group_means(findings: Findings, folder: Path, class_names: Sequence[str]) -> list[Path]:
    """Draw the mean map of each class and method over the mean scan of the class."""
    paths = []
    for (label, method), mean in findings.means.items():
        path = folder / f"mean_{class_names[label]}_{method}.png"
        whose = "" if is_number(class_names) else f"{class_names[label]} "
        planted = findings.planted.get(label)
        green = "" if planted is None else "\ngreen: planted in half of them, however weakly"
        title = (
            f"mean of {findings.counts[label]} {whose}scans   |   {TITLES[method]}"
            f"\n{evidence(class_names, method)}, {top_text(mean, findings.mean_images[label])}"
            f"{green}"
        )
        note = "To be read only where the scans are registered to one space."
        image = findings.mean_images[label]
        _draw(image, mean, findings.affine, path, title, note, truth=planted)
        paths.append(path)
    return paths


def save_page(case: Case, one: Map, path: Path, class_names: Sequence[str]) -> None:
    """Write a page with one scan and its map, not an empty one, to click through offline."""
    from nilearn import plotting

    head = head_mask(case.image)
    shown = _fine(hottest(one.values, head), case.affine)
    page = plotting.view_img(
        shown,
        bg_img=_fine(_with_dark_air(case.image), case.affine),
        threshold=1e-6,
        vmax=1,
        symmetric_cmap=False,
        cmap="inferno",
        black_bg=True,
        opacity=_ALPHA,
        width_view=_PAGE_WIDTH,
        cut_coords=tuple(map(float, peak_mm(one.values, case.affine))),
    )
    # nilearn writes a title over the slices and cuts it off at their edge
    lines = [case_title(case, class_names), map_title(case, one).replace(" (green)", "")]
    lines.append("Colours: share of the map's maximum. Click to move the cross.")
    heading = "<br>".join(map(escape, "\n".join(lines).split("\n")))
    heading = f'<p style="font: 15px sans-serif; margin: 8px">{heading}</p>'
    text = re.sub(
        r"(<body[^>]*>)", lambda tag: str(tag[1]) + heading, str(page.get_standalone()), count=1
    )
    tab = f"<title>{escape(f'{lines[0]}, {TITLES[one.method]}')}</title>"
    text = re.sub(r"<title>.*?</title>", lambda tag: tab, text, count=1)
    path.write_text(text, encoding="utf-8")


def case_title(case: Case, class_names: Sequence[str]) -> str:
    """Who it is, what it is, and what the network thinks."""
    name = class_names[-1]
    if case.verdict.number is not None:
        return (
            f"{case.subject}, {name} {case.number:.1f}   |   the network: "
            f"{case.verdict.number:.1f} {UNITS[name]}"
        )
    return (
        f"{case.subject} is {class_names[case.label]}   |   the network: "
        f"{case.verdict.probability:.0%} {name}"
    )


def top_text(values: Array, image: Array) -> str:
    """``hottest 5% of the head, 43% of the map``: what is drawn, and how much of all there is."""
    head = head_mask(image)
    inside = values[head].sum()
    share = f", {hottest(values, head).sum() / inside:.0%} of the map" if inside > 0 else ""
    return f"hottest {TOP:.0%} of the head{share}"


def map_title(case: Case, one: Map) -> str:
    """What a map is, what it can tell apart, and how it meets the truth."""
    cells = " x ".join(f"{side:.0f}" for side in one.cell_mm)
    title = f"{TITLES[one.method]}, cells of {cells} mm"
    if one.empty:
        return f"{title}: no evidence found"
    title = f"{title}, {top_text(one.values, case.image)}"
    if one.score is None:
        if case.truth is None:
            return title
        return f"{title}\ngreen: the change planted in this scan, however weak"
    place = "in" if one.score.peak_in else f"{one.score.distance_mm:.0f} mm from"
    return (
        f"{title}\npeak {place} the planted region (green), {one.score.times_chance:.1f} x chance "
        "inside"
    )


def evidence(class_names: Sequence[str], method: str = "") -> str:
    """What a map of a method, or of any with a sign, shows."""
    name = class_names[-1]
    if is_number(class_names):
        return f"what {'changes' if method in WITHOUT_SIGN else 'raises'} the {name} told"
    return f"{'what changes the score of' if method in WITHOUT_SIGN else 'evidence for'} {name}"


def meaning(case: Case, class_names: Sequence[str], method: str = "") -> str:
    """One sentence on what a map of this case means: of this method, or of any but the gradient."""
    name, own = class_names[-1], class_names[case.label]
    if is_number(class_names):
        does = "change" if method in WITHOUT_SIGN else "raise"
        return (
            f"Hot is what would {does} the {name} that the network tells; what lowers it is not "
            "shown. The scale is the map's own, so there is always a hottest place."
        )
    if method in WITHOUT_SIGN:
        return (
            f"A scan of {own}: hot is where a change of the image would change the score of {name} "
            "most, up or down."
        )
    if case.label == len(class_names) - 1:
        called = class_names[case.verdict.predicted]
        agrees = "and the network agrees" if called == name else f"but the network says {called}"
        return f"A scan of {name}, {agrees}; hot is what raises the score of {name}."
    return (
        f"A scan of {own}: hot is what speaks most for {name} in a scan that the network gives "
        f"{case.verdict.probability:.0%}. The scale is the map's own, so there is always a hottest "
        "place; it is no sign of disease."
    )


def _draw(
    image: Array,
    heatmap: Array,
    affine: Array,
    path: Path,
    title: str,
    note: str,
    truth: Array | None = None,
) -> None:
    figure = _titled(picture(image, heatmap, affine, truth), title, note)
    # level 6 takes three times as long for 5 % less
    figure.savefig(path, dpi=100, facecolor="black", pil_kwargs={"compress_level": 1})


def _titled(figure: Figure, title: str, note: str) -> Figure:
    lines = [part for line in title.split("\n") for part in _cut(line)]
    below = min(0.9, 0.98 - 0.028 * len(lines))
    figure.text(0.01, 0.985, "\n".join(lines), color="white", fontsize=10, va="top")
    figure.text(0.01, below, fill(note, 120), color="#bbbbbb", fontsize=9, va="top")
    return figure


def _cut(line: str) -> list[str]:
    """A line of a title, in several where it is longer than the picture is wide."""
    parts = [line] if len(line) <= _WIDE else line.split("   |   ")
    return [part for text in parts for part in wrap(text, _WIDE)]


def picture(image: Array, heatmap: Array, affine: Array, truth: Array | None = None) -> Figure:
    """Slices through a scan (D, H, W), with the hottest of a map and the contour of a truth."""
    head = head_mask(image)
    shown, peak = hottest(heatmap, head), peak_mm(heatmap, affine)
    middle = affine[:3, :3] @ (np.array(image.shape) / 2) + affine[:3, 3]
    figure = Figure(figsize=(11, 6), facecolor="black")  # not pyplot's: it keeps figures
    cut = slices.around(head, affine, peak if heatmap.any() else middle)
    rows = slices.draw_head(figure, cut, _along(_fine(_with_dark_air(image), affine)))
    if shown.any():
        least = float(shown[shown > 0].min())
        slices.lay_over(rows, cut, _along(_fine(shown, affine)), least, _ALPHA)
        slices.mark(rows, cut, peak)
        _draw_scale(figure, least)
    if truth is not None:
        slices.outline(rows, cut, _along(_fine(truth, affine)))
    return figure


def _draw_scale(figure: Figure, least: float) -> None:
    """A bar with the colours of what is laid over; a map is in shares of its own maximum."""
    least = min(least, 0.99)
    # below the longest line of a title; grey shines through the colours as a brain does
    axes = figure.add_axes((0.82, 0.87, 0.16, 0.016), facecolor="#606060")
    colours = ScalarMappable(Normalize(least, 1), "autumn")
    bar = figure.colorbar(
        colours, cax=axes, orientation="horizontal", ticks=[least, 1], alpha=_ALPHA
    )
    bar.ax.set_xticklabels([f"{least:.2f}", "1"], color="white", fontsize=8)
    bar.outline.set_visible(False)
    axes.set_title("share of the map's maximum", color="white", fontsize=8, pad=3)


def _along(image: Any) -> slices.Volume:
    """An image of `_fine`, whose voxels lie along the axes of the scanner."""
    return slices.Volume(np.asarray(image.dataobj), np.diag(image.affine)[:3], image.affine[:3, 3])


def _fine(values: Array, affine: Array) -> Any:
    """An image in voxels of ``DISPLAY_MM`` at most."""
    given = volume(np.asarray(values, dtype=np.float32), affine)
    sizes = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    if np.allclose(affine[:3, :3], np.diag(sizes)) and sizes.max() <= DISPLAY_MM + 1e-3:
        return given  # it is so already
    sizes = np.minimum(sizes, DISPLAY_MM)
    # nibabel has no types
    return resample_to_output(given, sizes.tolist(), order=1)  # type: ignore[no-untyped-call]


def _with_dark_air(image: Array) -> Array:
    """Air, exactly 0 in prepared scans, lies in the middle of the greys of a standardised one."""
    return np.where(image == 0, image.min(), image)
