"""The three difficulties of a synthetic cohort, and how ill each group is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Difficulty = Literal["L0", "L1", "L2"]
Diagnosis = Literal["NC", "sMCI", "pMCI", "AD"]


@dataclass(frozen=True)
class Level:
    """What varies in a cohort. Factors multiply the full variety; 0 switches it off.

    Attributes:
        name: of the level.
        box_drop: whether a drop of intensity in a box is planted instead of atrophy.
        pose: factor of head position and affine shape.
        elastic: factor of the smooth deformation of the whole brain.
        base_size: factor of the spread of healthy ventricle and hippocampus sizes.
        scanners: whether contrast, blur, bias field, noise and gain differ between scanners.
        raw: whether the head shell is around the brain, and voxel sizes, orientations and file
            types are as scanners give them.
    """

    name: Difficulty
    box_drop: bool
    pose: float
    elastic: float
    base_size: float
    scanners: bool
    raw: bool


LEVELS: dict[str, Level] = {
    "L0": Level("L0", True, pose=0, elastic=0, base_size=0, scanners=False, raw=False),
    "L1": Level("L1", False, pose=0.25, elastic=0, base_size=0.25, scanners=False, raw=False),
    "L2": Level("L2", False, pose=1, elastic=1, base_size=1, scanners=True, raw=True),
}


@dataclass(frozen=True)
class Group:
    """How ill the people of a group are.

    Severity .1/.2/.3/.4 widens the ventricles by about 15/31/50/70 % and takes 7/15/23/30 % of the
    hippocampi.

    Attributes:
        mean: of the severity at baseline.
        sd: its standard deviation.
        yearly: what the severity gains in a year.
        box_drop: severity in a cohort with planted boxes: the share of the intensity that is lost.
    """

    mean: float
    sd: float
    yearly: float
    box_drop: float


GROUPS: dict[Diagnosis, Group] = {
    "NC": Group(0.00, 0.04, 0.01, box_drop=0.0),
    "sMCI": Group(0.10, 0.05, 0.02, box_drop=0.15),
    "pMCI": Group(0.20, 0.06, 0.05, box_drop=0.3),
    "AD": Group(0.32, 0.08, 0.06, box_drop=0.5),
}

LEFT_EXCESS = 0.25
"""How much more the left hippocampus shrinks than the right, in strength per severity."""
