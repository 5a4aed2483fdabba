"""What an explanation of a test set finds: maps by method, drawn scans, tables of scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.localisation import Localisation
from models.maps.native import Array

MethodName = Literal["gradcam", "gradcam++", "hirescam", "gradient", "occlusion", "attention"]
TITLES: dict[str, str] = {
    "gradcam": "Grad-CAM",
    "gradcam++": "Grad-CAM++",
    "hirescam": "HiResCAM",
    "gradient": "input gradient",
    "occlusion": "occlusion",
    "attention": "attention map",
}
OF_A_LAYER = ("gradcam", "gradcam++", "hirescam", "attention")
"""Methods whose map is that of a layer."""


@dataclass(frozen=True)
class Map:
    """One map of one scan, masked to the head, (D, H, W)."""

    method: MethodName
    values: Array
    cell_mm: tuple[float, float, float]
    """What the map can tell apart along each axis."""
    score: Localisation | None
    """How it meets the truth; None without one, or if the map is empty."""

    @property
    def empty(self) -> bool:
        """Whether it is zero everywhere: the method found no evidence."""
        return not self.values.any()


@dataclass(frozen=True)
class Verdict:
    """What the trained network says of a scan."""

    predicted: int
    """The class of the highest probability."""
    probability: float
    """Of the class that is explained."""


@dataclass(frozen=True)
class Case:
    """One scan that is drawn: its image and maps lie on the grid of ``affine`` (voxels to mm)."""

    subject: str
    image_id: str
    label: int
    verdict: Verdict
    image: Array
    affine: Array
    truth: Array | None
    maps: tuple[Map, ...]


@dataclass(frozen=True)
class Findings:
    """What an explanation of a test set found; maps and images are (D, H, W)."""

    cases: list[Case]
    rows: list[dict[str, Any]]
    """One per scan, network and method, for a table."""
    means: dict[tuple[int, MethodName], Array]
    """Mean map of each label and method, of the trained network."""
    mean_images: dict[int, Array]
    planted: dict[int, Array]
    """Share of a label's scans that have a planted change, for each voxel; labels without none."""
    regions: dict[MethodName, dict[str, tuple[float, float]]]
    """Share of the explained class's mean map and of the head in each anatomical box."""
    affine: Array
    counts: Mapping[int, int]
    """Scans of each label."""
