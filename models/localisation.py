"""Does a map point at a known place? Scores of one map (D, H, W) against a mask on its grid.

Chance is what a map that is flat inside the head would score, so that a method gets no credit for
leaving the air alone. An empty map scores nothing.
"""

from dataclasses import dataclass

import numpy as np
from scipy import ndimage
from scipy.stats import rankdata

from models.maps.native import Array

TOP = 0.05
"""Share of the head that pictures show, hottest first."""

# boxes of RAS millimetres in the space of the MNI152 template; left is negative x
REGIONS = {
    "left hippocampus": ((-38, -12), (-46, 0), (-30, 8)),
    "right hippocampus": ((12, 38), (-46, 0), (-30, 8)),
    "lateral ventricles": ((-36, 36), (-52, 42), (-2, 32)),
}


@dataclass(frozen=True)
class Localisation:
    """How a map meets a mask.

    Attributes:
        peak_in: whether the hottest voxel lies in the mask (pointing game).
        peak_near: whether it lies there or not further away than one cell of the map.
        distance_mm: from the hottest voxel to the nearest one of the mask; 0 inside.
        energy: share of the map's sum that lies in the mask.
        chance: share of the head that lies in the mask.
        precision: share of the hottest k voxels that lie in the mask, k being the mask's size; a
            voxel of 0 is not hot.
    """

    peak_in: bool
    peak_near: bool
    distance_mm: float
    energy: float
    chance: float
    precision: float

    @property
    def times_chance(self) -> float:
        """Energy as a multiple of what a flat map has."""
        return self.energy / self.chance


def localise(
    heatmap: Array, mask: Array, head: Array, voxel_mm: Array, cell_mm: Array
) -> Localisation | None:
    """Score a map; None when there is nothing to score: an empty map, or an empty mask.

    Args:
        heatmap: (D, H, W), 0 or more.
        mask: The known place, boolean (D, H, W).
        head: Where the head is, boolean (D, H, W).
        voxel_mm: Size of a voxel along each axis, (3,).
        cell_mm: Size of a cell of the map along each axis, (3,): what it can tell apart.
    """
    mask = mask & head
    heatmap = np.where(head, heatmap, 0)
    if not mask.any() or not heatmap.any():
        return None
    peak = np.unravel_index(heatmap.argmax(), heatmap.shape)
    distance, nearest = ndimage.distance_transform_edt(
        ~mask, sampling=voxel_mm, return_indices=True
    )
    offset_mm = np.abs(nearest[(slice(None), *peak)] - np.array(peak)) * voxel_mm
    size = int(mask.sum())
    hottest = np.argsort(heatmap, axis=None)[::-1][:size]
    return Localisation(
        peak_in=bool(mask[peak]),
        peak_near=bool((offset_mm <= cell_mm + 1e-6).all()),
        distance_mm=float(distance[peak]),
        energy=float(heatmap[mask].sum() / heatmap.sum()),
        chance=float(size / head.sum()),
        precision=float((mask & (heatmap > 0)).flat[hottest].mean()),
    )


def hottest(heatmap: Array, head: Array, share: float = TOP) -> Array:
    """The map inside the head with all but its hottest voxels set to 0.

    Args:
        heatmap: (D, H, W).
        head: Where the head is, boolean (D, H, W).
        share: Of the head's voxels to keep; voxels of 0 are never kept.
    """
    inside = np.where(head, heatmap, 0)
    keep = max(1, round(share * int(head.sum())))
    positive = inside[inside > 0]
    if positive.size <= keep:
        return np.where(inside > 0, inside, 0)
    least = np.partition(positive, -keep)[-keep]  # of all voxels it takes ten times as long
    return np.where(inside >= least, inside, 0)


def by_region(heatmap: Array, head: Array, affine: Array) -> dict[str, tuple[float, float]]:
    """Share of the map and share of the head in each anatomical box, and in none of them.

    Only for scans in the space of the MNI152 template. The boxes touch each other: a voxel counts
    for the first box that holds it.

    Args:
        heatmap: (D, H, W).
        head: Where the head is, boolean (D, H, W).
        affine: (4, 4), from voxels to millimetres.
    """
    index = np.indices(heatmap.shape).reshape(3, -1)
    mm = (affine[:3, :3] @ index + affine[:3, 3:]).reshape(3, *heatmap.shape)
    free, total, head_total = head.copy(), float(heatmap[head].sum()), int(head.sum())
    shares = {}
    for name, box in REGIONS.items():
        inside = free.copy()
        for along, (low, high) in zip(mm, box):
            inside &= (along >= low) & (along <= high)
        free &= ~inside
        shares[name] = inside
    shares["elsewhere"] = free
    return {
        name: (
            float(heatmap[inside].sum() / total) if total else 0.0,
            float(inside.sum() / max(head_total, 1)),
        )
        for name, inside in shares.items()
    }


def similarity(one: Array, other: Array, head: Array) -> float:
    """Rank correlation (Spearman) of two maps inside the head; 0 when one of them is flat."""
    ranks = [rankdata(heatmap[head]) for heatmap in (one, other)]
    if min(r.std() for r in ranks) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])
