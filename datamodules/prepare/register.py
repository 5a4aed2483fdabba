"""Bring a head to the template: an affine, from many starts and over several scales.

The template is stripped and the scan usually is not. What is compared is therefore the template's
brain and a thin rim around it, in which the template is 0 and a head has fluid and bone: scalp,
face and neck never take part where the two lie on each other. What is left to go wrong is the
start. The vertex and the widest part of the head above the eyes give the place, a grid of tilts
around it gives the direction; the best of them are followed, and where two of them end in different
places that are nearly as good, nobody knows which is right: the scan is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import ndimage

from ..nifti import BadFile
from ..synth.grids import Array, Grid, linear, sample
from ..synth.subject import rotation
from ..voxels import tissue
from .itk import affine_of, ras_of, resampled, simple_itk, to_itk
from .template import template

_RIM_MM = 5.0  # of what surrounds the template's brain: fluid and bone of a head
_SCALP_MM = 13.0  # from the vertex down to the brain
_ABOVE_EYES_MM = 70.0  # from the vertex down: there a head is as wide as its brain, and no nose
_TILTS = (-30, -20, -10, 0, 10, 20, 30), (-12, 0, 12), (-12, 0, 12)  # degrees about x, y, z
_LIFTS_MM = (-12.0, 0.0, 12.0)
_FOLLOWED, _NEIGHBOURS_MM = 3, 8.0  # starts, and how far they differ at least
_LAST_STEP_MM, _STEPS = 0.01, 80
_BINS = 32
_SAMPLES = 20_000
_RIVAL = 0.9  # of the best one's mutual information: an end that is nearly as good
_APART_MM = 4.0  # two starts that end so far apart have not both found the brain
_ALIKE = 0.5  # correlation with the template within its brain
_SCALES = (0.75, 1.35)  # of a head along its axes, to the template


@dataclass(frozen=True)
class Registration:
    """Where the template's points lie in a scan.

    Attributes:
        to_scan: (4, 4) RAS millimetres of the template to those of the scan.
        apart_mm: mean distance in the brain from where the best start ended to where any other did
            that is nearly as good, at 4 mm; 0 where there is none.
        correlation: of scan and template, within the template's brain.
        scales: (3,) sides of the scan's head over the template's, the smallest first.
    """

    to_scan: Array
    apart_mm: float
    correlation: float
    scales: Array

    def refuse_failure(self) -> None:
        """Raise where the brain was not found.

        Raises:
            BadFile: ``REGISTRATION``.
        """
        scales = ", ".join(f"{scale:.2f}" for scale in self.scales)
        for failed, what in (
            (self.apart_mm > _APART_MM, f"two starts ended {self.apart_mm:.1f} mm apart"),
            (self.correlation < _ALIKE, f"correlation {self.correlation:.2f} with the template"),
            (
                self.scales[0] < _SCALES[0] or self.scales[-1] > _SCALES[1],
                f"scaled by {scales}",
            ),
        ):
            if failed:
                raise BadFile(
                    "REGISTRATION",
                    f"{what}: the brain was not found",
                    "look at its quality page; is it a T1-weighted scan of a whole head, and is "
                    "its orientation right?",
                )


def register(values: Array, affine: Array, stripped: bool) -> Registration:
    """Find the template's brain in a scan.

    Args:
        values: (X, Y, Z), the background at 0, the bias field corrected.
        affine: (4, 4) voxels to RAS millimetres.
        stripped: whether it is a brain without a head.
    """
    itk = simple_itk()
    coarse, middle, fine = (_Scale(values, affine, mm) for mm in (8.0, 4.0, 2.0))
    place = _place(values, affine, stripped)
    brain = template(4.0).brain_mm()
    starts = _best_and_different(_starts(place), coarse.information, brain)
    ends = [middle.improved(start, itk.Similarity3DTransform, 2.0) for start in starts]
    ends = [middle.improved(end, _affine, 0.2) for end in ends]
    worth = {id(end): middle.information(end) for end in ends}
    ends.sort(key=lambda end: worth[id(end)], reverse=True)
    rivals = [end for end in ends[1:] if worth[id(end)] > _RIVAL * worth[id(ends[0])]]
    best = fine.improved(ends[0], _affine, 0.1)
    there = resampled(to_itk(values, affine), fine.template.grid, best, cubic=False)
    inside = fine.template.brain
    return Registration(
        to_scan=best,
        apart_mm=max((_apart_mm(ends[0], rival, brain) for rival in rivals), default=0.0),
        correlation=float(np.corrcoef(there[inside], fine.template.t1[inside])[0, 1]),
        scales=np.sort(np.linalg.svd(best[:3, :3], compute_uv=False)),
    )


def _affine() -> Any:
    return simple_itk().AffineTransform(3)


def _best_and_different(
    starts: Iterator[Array], worth: Callable[[Array], float], brain: Array
) -> list[Array]:
    """The best start, and the next best ones that are no neighbours of those before."""
    chosen: list[Array] = []
    for start in sorted(starts, key=worth, reverse=True):
        if all(_apart_mm(start, other, brain) > _NEIGHBOURS_MM for other in chosen):
            chosen.append(start)
        if len(chosen) == _FOLLOWED:
            break
    return chosen


def _apart_mm(one: Array, other: Array, points: Array) -> float:
    """Mean distance between where two affines (4, 4) bring points (3, N)."""
    gap = one - other
    return float(np.linalg.norm(gap[:3, :3] @ points + gap[:3, 3:], axis=0).mean())


def _place(values: Array, affine: Array, stripped: bool) -> Array:
    """A point (3,) in mm that every head has: the middle of its widest part, at its vertex."""
    grid = Grid(values.shape, affine)
    head = tissue(values)
    points = grid.coordinates()[:, head][:, ::7]
    # a few bright voxels are no vertex
    top = float(np.percentile(points[2], 99.8))
    above = points[:, points[2] > top - _ABOVE_EYES_MM]
    sides = np.percentile(above[:2], [1, 99], axis=1).mean(axis=0)
    return np.array([*sides, top - (0.0 if stripped else _SCALP_MM)])


def _starts(place: Array) -> Iterator[Array]:
    """Rigid ways (4, 4) to lay the template into a scan: vertex at ``place``, turned, lifted."""
    brain = template(4.0).brain_mm()
    above = brain[:, brain[2] > brain[2].max() - _ABOVE_EYES_MM]
    vertex = np.array([*np.percentile(above[:2], [1, 99], axis=1).mean(axis=0), brain[2].max()])
    middle = brain.mean(axis=1)
    for *tilt, lift in itertools.product(*_TILTS, _LIFTS_MM):
        start = np.eye(4)
        start[:3, :3] = rotation(np.deg2rad(tilt))
        start[:3, 3] = middle + place - vertex + [0, 0, lift] - start[:3, :3] @ middle
        yield start


class _Scale:
    """Scan and template, smoothed for voxels of one size.

    Args:
        values: (X, Y, Z) of the scan.
        affine: (4, 4) voxels to RAS millimetres.
        mm: size of the template's voxels.
    """

    def __init__(self, values: Array, affine: Array, mm: float) -> None:
        sizes = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
        self.template = template(mm)
        self._scan = ndimage.gaussian_filter(values, 0.4 * mm / sizes)
        self._affine, self._inverse = affine, np.linalg.inv(affine)
        rim = ndimage.distance_transform_edt(~self.template.brain, sampling=mm) <= _RIM_MM
        self._near = self.template.brain | rim
        self._points = self.template.grid.coordinates()[:, self._near]
        self._greys = _ranked(self.template.t1[self._near])

    def information(self, to_scan: Array) -> float:
        """Mutual information of the template and what lies there in the scan, in nats."""
        voxels = self._inverse @ to_scan
        there = sample(self._scan, linear(voxels[:3, :3], voxels[:3, 3], self._points))
        counts = np.histogram2d(self._greys, _ranked(there), _BINS)[0] / there.size
        alone = counts.sum(axis=0, keepdims=True) * counts.sum(axis=1, keepdims=True)
        seen = counts > 0
        return float((counts[seen] * np.log(counts[seen] / alone[seen])).sum())

    def improved(self, to_scan: Array, kind: Any, step_mm: float) -> Array:
        """Follow the gradient of mutual information from an affine (4, 4), and give the end.

        An end that is worse than the start is tried again with shorter steps.

        Args:
            to_scan: where to start.
            kind: class of transforms of SimpleITK that says what may change.
            step_mm: length of the first step; an affine runs away from long ones.
        """
        worth = self.information(to_scan)
        for shorter in (1.0, 0.3, 0.1):
            end = self._followed(to_scan, kind(), step_mm * shorter)
            if self.information(end) > worth:
                return end
        return to_scan

    def _followed(self, to_scan: Array, kind: Any, step_mm: float) -> Array:
        itk = simple_itk()
        method = itk.ImageRegistrationMethod()
        method.SetNumberOfThreads(1)  # sums of several threads differ in their last digits
        method.SetMetricAsMattesMutualInformation(_BINS)
        share = min(1.0, _SAMPLES / self._points.shape[1])
        method.SetMetricSamplingStrategy(method.RANDOM)
        method.SetMetricSamplingPercentage(share, 1)
        grid = self.template.grid
        method.SetMetricFixedMask(itk.Cast(to_itk(self._near, grid.affine), itk.sitkUInt8))
        method.SetInterpolator(itk.sitkLinear)
        method.SetOptimizerAsRegularStepGradientDescent(
            step_mm, _LAST_STEP_MM, _STEPS, relaxationFactor=0.6
        )
        method.SetOptimizerScalesFromPhysicalShift()
        kind.SetCenter((0.0, 18.0, 10.0))  # of the brain, LPS
        method.SetMovingInitialTransform(affine_of(to_scan))
        method.SetInitialTransform(kind, inPlace=True)
        method.Execute(to_itk(self.template.t1, grid.affine), to_itk(self._scan, self._affine))
        return np.asarray(to_scan @ ras_of(kind))


def _ranked(values: Array) -> Array:
    """Values from 0 to 1, what is beyond the percentiles 1 and 99 brought there."""
    low, high = np.percentile(values, [1, 99])
    return np.asarray(np.clip((values - low) / max(high - low, 1e-6), 0, 1))
