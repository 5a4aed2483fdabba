"""The three difficulties of a synthetic cohort, and how ill each group is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Difficulty = Literal["L0", "L1", "L2"]
Diagnosis = Literal["NC", "sMCI", "pMCI", "AD"]


@dataclass(frozen=True)
class Level:
    """What varies in a cohort. Factors multiply the full variety; 0 switches it off."""

    name: Difficulty
    box_drop: bool
    """Plant a drop of intensity in a box instead of atrophy."""
    pose: float
    """Head position and affine shape."""
    elastic: float
    """Smooth deformation of the whole brain."""
    base_size: float
    """Spread of healthy ventricle and hippocampus sizes."""
    scanners: bool
    """Contrast, blur, bias field, noise and gain differ between scanners."""
    raw: bool
    """Head shell around the brain; voxel sizes, orientations and file types as scanners give."""


LEVELS: dict[str, Level] = {
    "L0": Level("L0", True, pose=0, elastic=0, base_size=0, scanners=False, raw=False),
    "L1": Level("L1", False, pose=0.25, elastic=0, base_size=0.25, scanners=False, raw=False),
    "L2": Level("L2", False, pose=1, elastic=1, base_size=1, scanners=True, raw=True),
}


@dataclass(frozen=True)
class Group:
    """Severity at baseline (mean, standard deviation) and its gain per year.

    Severity .1/.2/.3/.4 widens the ventricles by about 15/31/50/70 % and takes 7/15/23/30 % of the
    hippocampi.
    """

    mean: float
    sd: float
    yearly: float
    box_drop: float
    """Severity in a cohort with planted boxes: the share of the intensity that is lost."""


GROUPS: dict[Diagnosis, Group] = {
    "NC": Group(0.00, 0.04, 0.01, box_drop=0.0),
    "sMCI": Group(0.10, 0.05, 0.02, box_drop=0.15),
    "pMCI": Group(0.20, 0.06, 0.05, box_drop=0.3),
    "AD": Group(0.32, 0.08, 0.06, box_drop=0.5),
}

LEFT_EXCESS = 0.25
"""How much more the left hippocampus shrinks than the right, in strength per severity."""
