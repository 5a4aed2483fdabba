"""What an explanation of a test set finds: maps by method, drawn scans, tables of scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.localisation import Localisation
from models.maps.native import Array

MethodName = Literal[
    "gradcam",
    "gradcam++",
    "hirescam",
    "gradient",
    "smoothgrad",
    "integrated",
    "occlusion",
    "attention",
]
TITLES: dict[str, str] = {
    "gradcam": "Grad-CAM",
    "gradcam++": "Grad-CAM++",
    "hirescam": "HiResCAM",
    "gradient": "input gradient",
    "smoothgrad": "SmoothGrad",
    "integrated": "integrated gradients",
    "occlusion": "occlusion",
    "attention": "attention map",
}
OF_A_LAYER = ("gradcam", "gradcam++", "hirescam", "attention")
"""Methods whose map is that of a layer."""
WITHOUT_SIGN = ("gradient", "smoothgrad")
"""Methods that show where a change counts, and not for which class."""


@dataclass(frozen=True)
class Map:
    """One map of one scan, masked to the head, (D, H, W).

    Attributes:
        method: that has made it.
        values: the map itself.
        cell_mm: what the map can tell apart along each axis, in mm.
        score: how it meets the truth; None without one, or if the map is empty.
    """

    method: MethodName
    values: Array
    cell_mm: tuple[float, float, float]
    score: Localisation | None

    @property
    def empty(self) -> bool:
        """Whether it is zero everywhere: the method found no evidence."""
        return not self.values.any()


@dataclass(frozen=True)
class Verdict:
    """What the trained network says of a scan.

    Attributes:
        predicted: the class of the highest probability; 0 where a number is told.
        probability: of the class that is explained.
        number: that is told; None: classes are.
    """

    predicted: int
    probability: float
    number: float | None = None


@dataclass(frozen=True)
class Case:
    """One scan that is drawn.

    Attributes:
        subject: whose scan it is.
        image_id: image ID of the scan.
        label: index of its true class; 0 where a number is told.
        verdict: of the trained network.
        image: (D, H, W).
        affine: (4, 4) voxels to mm, of the image and the maps.
        truth: (D, H, W) mask of what was planted; None: there is none.
        maps: of the trained network, one for each method.
        number: the true one, where a number is told.
    """

    subject: str
    image_id: str
    label: int
    verdict: Verdict
    image: Array
    affine: Array
    truth: Array | None
    maps: tuple[Map, ...]
    number: float | None = None


@dataclass(frozen=True)
class Findings:
    """What an explanation of a test set found; maps and images are (D, H, W).

    Attributes:
        cases: the scans that are drawn, the highest label first.
        rows: one per scan, network and method, for a table.
        means: mean map by label and method, of the trained network.
        mean_images: mean image of each label.
        planted: share of a label's scans that have a planted change, for each voxel; labels with
            truth only.
        regions: share of the explained class's mean map and of the head in each anatomical box;
            empty for scans on several grids.
        affine: (4, 4) voxels to mm, of the last scan.
        counts: scans of each label.
    """

    cases: list[Case]
    rows: list[dict[str, Any]]
    means: dict[tuple[int, MethodName], Array]
    mean_images: dict[int, Array]
    planted: dict[int, Array]
    regions: dict[MethodName, dict[str, tuple[float, float]]]
    affine: Array
    counts: Mapping[int, int]
