"""The template that scans are brought to: ICBM 2009a, symmetric, as the nilearn wheel carries it.

It is skull-stripped, 1 mm, and exactly symmetric, so a flip of left and right cannot be seen by
comparing with it. It is read at run time and never copied into this project.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import ndimage

from ..synth.anatomy import template_box_mm, template_volume
from ..synth.grids import Array, Grid, centred_grid

SPACE = "MNI152NLin2009aSym"
_BRAIN = 0.12  # of the template's brightest value


@dataclass(frozen=True)
class Template:
    """The template on a grid.

    Attributes:
        grid: of cubic voxels; whole, so that every scan's brain fits.
        t1: (X, Y, Z) float32, 0 to 1, 0 outside of the brain.
        brain: (X, Y, Z) boolean, without holes.
    """

    grid: Grid
    t1: Array
    brain: Array

    def brain_mm(self, count: int = 2000) -> Array:
        """Some points of the brain, evenly spread, (3, count) in mm."""
        points = self.grid.coordinates()[:, self.brain].astype(float)
        return points[:, :: max(1, points.shape[1] // count)]


@cache
def template(resolution_mm: float) -> Template:
    """The template in voxels of that size."""
    grid = centred_grid(template_box_mm(), np.full(3, resolution_mm))
    t1 = template_volume("t1", grid, resolution_mm)
    brain = ndimage.binary_closing(t1 > _BRAIN, iterations=max(1, round(3 / resolution_mm)))
    return Template(grid, t1, np.asarray(ndimage.binary_fill_holes(brain)))
