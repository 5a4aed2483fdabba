from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from models.findings import Case, Map, Verdict
from models.localisation import TOP, Localisation
from models.overlay import _titled, map_title, picture
from models.slices import ends_mm, places

AFFINE = np.diag([2.0, 2, 2, 1])  # as fine as pictures are: nothing is resampled
AFFINE[:3, 3] = (-30, -40, -20)
HEAD = np.zeros((20, 24, 20), bool)
HEAD[2:18, 3:21, 2:18] = True
IMAGE = np.where(HEAD, 1.5, 0.0)


def case(truth: np.ndarray | None = None) -> Case:
    return Case("999_S_0001", "I9000001", 1, Verdict(1, 0.9), IMAGE, AFFINE, truth, ())


def title(truth: np.ndarray | None = None, **score: Any) -> str:
    found = Localisation(**score) if score else None
    return map_title(case(truth), Map("gradcam", IMAGE, (16.0, 16.0, 16.0), found))


def test_the_title_has_the_distance_to_the_planted_region_and_times_chance() -> None:
    known = {"energy": 0.34, "chance": 0.1, "precision": 0.5, "peak_near": True}
    missed = title(HEAD, peak_in=False, distance_mm=12.4, **known)
    assert "cells of 16 x 16 x 16 mm, hottest 5% of the head, " in missed
    assert "\npeak 12 mm from the planted region" in missed
    assert "3.4 x chance inside" in missed
    assert "peak in the planted region" in title(HEAD, peak_in=True, distance_mm=0.0, **known)
    # nothing is known: no place is claimed; of a flat map all is as hot
    assert title().endswith("hottest 5% of the head, 100% of the map")
    nothing = map_title(case(), Map("gradcam", np.zeros_like(IMAGE), (16.0, 16.0, 16.0), None))
    assert nothing.endswith("no evidence found")


def test_a_long_title_is_whole_and_above_the_note_and_the_slices() -> None:
    name = "ADNI_999_S_0001_MR_MPR__GradWarp__N3__Scaled_" * 5
    shown = list(_titled(Figure(), f"{name}   |   the network: 55% AD\nHiResCAM", "note").texts)
    assert shown[0].get_text().replace("\n", "").endswith("the network: 55% ADHiResCAM")
    assert max(map(len, shown[0].get_text().split("\n"))) <= 120
    assert 0.82 < shown[1].get_position()[1] < 0.9


def mosaics(figure: Figure) -> list[np.ma.MaskedArray]:
    """What is laid over the scan in each row."""
    return [axes.images[1].get_array() for axes in figure.axes[:3]]


def test_only_the_hottest_of_the_head_is_drawn() -> None:
    heatmap = np.random.default_rng(0).random(HEAD.shape)
    heatmap[5, 6, 7] = 1.5
    heatmap[0] = 2.0  # air
    inside = np.where(HEAD, heatmap, 0) / 1.5
    least = np.sort(inside[HEAD])[-round(TOP * HEAD.sum())]
    assert 0.05 <= TOP <= 0.1
    for axis, drawn in enumerate(mosaics(picture(IMAGE, inside, AFFINE))):
        cuts = places(ends_mm(HEAD, AFFINE)[axis], AFFINE[axis, 3] + 2 * (5, 6, 7)[axis])
        planes = [inside.take(round((mm - AFFINE[axis, 3]) / 2), axis) for mm in cuts]
        expected = np.concatenate([plane[plane >= least] for plane in planes])
        np.testing.assert_allclose(np.sort(drawn.compressed()), np.sort(expected), rtol=1e-6)


@pytest.mark.parametrize("voxel_mm", [(2.0, 2, 2), (4.0, 4, 4), (1.0, 1.5, 1.2)])
@pytest.mark.parametrize("spot", [(4, 5, 15), (14, 6, 4), (5, 18, 13)])
def test_left_is_left_and_up_is_up_and_the_mark_is_at_the_peak(voxel_mm, spot) -> None:
    affine = np.diag([*voxel_mm, 1])
    affine[:3, 3] = (-30, -40, -20)
    heatmap = np.zeros(HEAD.shape)
    heatmap[spot] = 1
    figure = picture(IMAGE, heatmap, affine)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3].astype(int)
    cyan = (pixels[..., 0] < 90) & (pixels[..., 1:].min(axis=-1) > 200)
    middle = (np.argwhere(HEAD).min(axis=0) + np.argwhere(HEAD).max(axis=0)) / 2
    away = (np.array(spot) - middle) * np.array(voxel_mm)
    side_mm = (np.ptp(np.argwhere(HEAD), axis=0) * np.array(voxel_mm)).max() + 8
    for axis, axes in enumerate(figure.axes[:3]):
        box = axes.get_window_extent()
        rows, columns = np.nonzero(cyan[round(box.y0) : round(box.y1)])
        per_mm = box.width / 7 / side_mm  # a tile is a square around the head
        right, up = (away[other] for other in range(3) if other != axis)
        in_tile = (columns.mean() - box.x0) % (box.width / 7) - box.width / 14
        assert in_tile / per_mm == pytest.approx(right, abs=2.5)
        assert (rows.mean() - box.height / 2) / per_mm == pytest.approx(up, abs=2.5)


def test_a_map_without_evidence_has_no_colour_and_no_mark_but_the_planted_contour() -> None:
    figure = picture(IMAGE, np.zeros(HEAD.shape), AFFINE, HEAD)
    assert len(figure.axes) == 3  # no scale either
    for axes in figure.axes:
        assert len(axes.images) == 1
        (contour,) = axes.collections
        assert contour.levels == [0.5]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_lie_in_the_head_and_one_goes_through_the_peak(axis) -> None:
    cuts = places(ends_mm(HEAD, AFFINE)[axis], -3.0)
    index = np.argwhere(HEAD)[:, axis] * 2 + AFFINE[axis, 3]
    assert -3.0 in cuts
    assert len(cuts) == 7
    assert index.min() <= cuts[0] < cuts[-1] <= index.max()


def test_a_head_that_is_cut_off_or_all_air_is_drawn() -> None:
    everywhere = np.random.default_rng(0).random(HEAD.shape) + 1
    for image in (everywhere, np.zeros(HEAD.shape)):
        rows = picture(image, np.zeros(HEAD.shape), AFFINE).axes
        assert all(len(axes.images) == 1 for axes in rows)
