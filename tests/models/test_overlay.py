from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from models.findings import Case, Map, Verdict
from models.localisation import TOP, Localisation
from models.overlay import _lay_over, _layers, map_title, slices

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


@dataclass
class Display:
    """What is laid over a picture."""

    overlays: list[np.ndarray] = field(default_factory=list)
    marks: list[list[float]] = field(default_factory=list)
    contours: list[np.ndarray] = field(default_factory=list)

    def add_overlay(self, image: Any, **options: Any) -> None:
        assert options["threshold"] > 0
        values = np.asarray(image.dataobj)
        self.overlays.append(np.where(values > options["threshold"], values, 0))

    def add_markers(self, places: Any, **options: Any) -> None:
        self.marks += [list(map(float, place)) for place in places]

    def add_contours(self, image: Any, **options: Any) -> None:
        self.contours.append(np.asarray(image.dataobj))


def test_only_the_hottest_of_the_head_is_drawn_and_the_mark_is_at_the_peak() -> None:
    heatmap = np.random.default_rng(0).random(HEAD.shape)
    heatmap[5, 6, 7] = 1.5
    heatmap[0] = 2.0  # air
    inside = np.where(HEAD, heatmap, 0) / 1.5
    display = Display()
    _lay_over(display, _layers(IMAGE, inside, AFFINE, None))
    [drawn] = display.overlays
    assert 0 < (drawn > 0).sum() == round(TOP * HEAD.sum())
    assert 0.05 <= TOP <= 0.1
    assert not drawn[~HEAD].any()
    assert drawn[drawn > 0].min() >= np.quantile(inside[HEAD], 1 - TOP) - 1e-6
    assert display.marks == [[2 * 5 - 30, 2 * 6 - 40, 2 * 7 - 20]]
    assert display.contours == []


def test_a_map_without_evidence_has_no_colour_and_no_mark_but_the_planted_contour() -> None:
    display = Display()
    _lay_over(display, _layers(IMAGE, np.zeros(HEAD.shape), AFFINE, HEAD))
    assert (display.overlays, display.marks) == ([], [])
    assert len(display.contours) == 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_lie_in_the_head_and_one_goes_through_the_peak(axis) -> None:
    cuts = slices(IMAGE, AFFINE, axis, -3.0)
    index = np.argwhere(HEAD)[:, axis] * 2 + AFFINE[axis, 3]
    assert -3.0 in cuts
    assert len(cuts) == 7
    assert index.min() <= cuts[0] < cuts[-1] <= index.max()
