"""From a file to the tensor the network sees.

The deterministic part is cached on disk; the random part is drawn anew each time. Order:
orientation, voxel size, field of view, intensity. Statistics are taken from the single image only,
so nothing of the training set leaks into the held-out ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.data.meta_tensor import MetaTensor
from monai.transforms.croppad.dictionary import ResizeWithPadOrCropd
from monai.transforms.intensity.dictionary import (
    RandAdjustContrastd,
    RandBiasFieldd,
    RandGaussianNoised,
    RandScaleIntensityd,
)
from monai.transforms.spatial.array import SpatialResample
from monai.transforms.spatial.dictionary import Orientationd, RandAffined, RandFlipd, Spacingd
from monai.transforms.transform import MapTransform, Transform
from monai.transforms.utility.dictionary import EnsureTyped

from .background import level, otsu
from .nifti import affine_of
from .profiles import Profile
from .space import Millimetres
from .voxels import head_box

SHAPE, SPACING_MM = (91, 109, 91), 2.0
"""Default size and voxel size: the MNI152 box at 2 mm."""

_TINY = torch.finfo(torch.float32).tiny  # scans may come in any unit
_LIMIT = 3.0  # standard deviations: beyond it lie vessels and artefacts


class LoadScand(Transform):
    """Read the file named by ``image`` as a MONAI image (1, X, Y, Z) float32 with its affine.

    The background is brought to 0 and nothing is below it, whatever the unit of the file. A series
    of one volume is a volume. NaN and infinity become 0 and a file without orientation is taken for
    RAS: the check has refused both, unless it was told not to.
    """

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return ``data`` with the image instead of its path."""
        image: Any = nib.load(data["image"])
        values = np.asarray(image.dataobj, dtype=np.float32)
        while values.ndim > 3 and values.shape[-1] == 1:
            values = values[..., 0]
        values = np.nan_to_num(values, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        voxels = torch.from_numpy(np.ascontiguousarray(level(values).values))[None]
        affine = torch.as_tensor(affine_of(image), dtype=torch.float64)
        return {**data, "image": MetaTensor(voxels, affine=affine)}


class KeepAffined(Transform):
    """Copy the affine of a MONAI image into an ordinary entry, (4, 4) float32.

    It maps voxel indices of the tensor to the scanner's RAS millimetres, so that a saliency map can
    be drawn over the original file.
    """

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return ``data`` with the entry ``affine``."""
        affine = torch.as_tensor(np.asarray(data["image"].affine), dtype=torch.float32)
        return {**data, "affine": affine}


class CropHeadd(MapTransform):
    """Crop and pad around the head, wherever it lies in the field of view.

    Args:
        keys: of the images, in RAS order.
        spatial_size: voxels (D, H, W) afterwards.
    """

    def __init__(self, keys: Sequence[str], spatial_size: tuple[int, int, int]) -> None:
        super().__init__(keys)
        self.spatial_size = spatial_size

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return ``data`` with the cropped images, their affines moved along."""
        out = dict(data)
        for key in self.key_iterator(out):
            out[key] = self._crop(out[key])
        return out

    def _crop(self, image: Any) -> MetaTensor:
        affine = torch.as_tensor(np.asarray(image.affine), dtype=torch.float64)
        middle, _ = head_box(image.as_tensor()[0].numpy(), affine[:3, :3].norm(dim=0).numpy())
        size = np.array(self.spatial_size)
        start = np.rint(middle - (size - 1) / 2).astype(int)
        low, high = np.maximum(start, 0), np.minimum(start + size, image.shape[1:])
        cropped = torch.zeros(1, *self.spatial_size)
        source = tuple(slice(a, b) for a, b in zip(low, high))
        target = tuple(slice(a, b) for a, b in zip(low - start, high - start))
        cropped[0][target] = image.as_tensor()[0][source]
        affine[:3, 3] += affine[:3, :3] @ torch.as_tensor(start, dtype=torch.float64)
        return MetaTensor(cropped, affine=affine)


class ResampleInSpaced(MapTransform):
    """Bring images onto one grid of their common space: RAS, cubic voxels, around a point.

    Args:
        keys: of the images, MONAI images with their affine.
        spatial_size: voxels (D, H, W) afterwards; what lies outside of the image is 0.
        spacing_mm: voxel size.
        middle_mm: where the middle of the grid lies.
    """

    def __init__(
        self,
        keys: Sequence[str],
        spatial_size: tuple[int, int, int],
        spacing_mm: float,
        middle_mm: Millimetres,
    ) -> None:
        super().__init__(keys)
        self.spatial_size = spatial_size
        affine = np.diag([spacing_mm] * 3 + [1.0])
        affine[:3, 3] = np.array(middle_mm) - spacing_mm * (np.array(spatial_size) - 1) / 2
        self.affine = torch.as_tensor(affine)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return ``data`` with the resampled images."""
        out = dict(data)
        resample = SpatialResample(mode="bilinear", padding_mode="zeros", align_corners=True)
        for key in self.key_iterator(out):
            there = resample(out[key], dst_affine=self.affine, spatial_size=self.spatial_size)
            out[key] = MetaTensor(there.as_subclass(torch.Tensor).float(), affine=self.affine)
        return out


class StandardiseHeadd(MapTransform):
    """Bring the head to mean 0 and standard deviation 1, clip at three of them; the rest is 0.

    Without the subtraction the contrast between head and air drowns the contrast inside the head:
    3D-ResAttNet then learns slowly or not at all.

    Args:
        keys: of the images.
        noisy_air: the head is what Otsu's threshold finds, since the air is not 0; else it is every
            voxel above 0.
    """

    def __init__(self, keys: Sequence[str], noisy_air: bool = False) -> None:
        super().__init__(keys)
        self.noisy_air = noisy_air

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return ``data`` with the scaled images."""
        out = dict(data)
        for key in self.key_iterator(out):
            values = out[key].as_tensor()
            lowest = otsu(values.numpy()) if self.noisy_air else 0.0
            head = values[values > lowest]
            if head.numel() > 1:
                scaled = ((values - head.mean()) / head.std().clamp_min(_TINY)).clamp(
                    -_LIMIT, _LIMIT
                )
                out[key] = out[key].clone()
                out[key][:] = torch.where(values > lowest, scaled, 0.0)
        return out


def fixed_transforms(
    spatial_shape: tuple[int, int, int],
    spacing_mm: float,
    profile: Profile = "stripped",
    middle_mm: Millimetres | None = None,
) -> list[Transform]:
    """File to plain float32 tensor (1, D, H, W), RAS, at the given size and voxel size.

    With ``middle_mm`` all scans lie on one grid around that point of the space they share. Else raw
    heads are cropped around the head, all others around the middle of the volume.
    """
    keys = ["image"]
    place: list[Transform]
    if middle_mm is not None:
        place = [ResampleInSpaced(keys, spatial_shape, spacing_mm, middle_mm)]
    else:
        crop = CropHeadd if profile == "raw" else ResizeWithPadOrCropd
        place = [
            Orientationd(keys, axcodes="RAS", labels=None),
            Spacingd(keys, pixdim=(spacing_mm,) * 3, mode="bilinear"),
            crop(keys, spatial_size=spatial_shape),
        ]
    return [
        LoadScand(),
        *place,
        StandardiseHeadd(keys, noisy_air=profile != "stripped"),
        KeepAffined(),
        EnsureTyped(keys, dtype=torch.float32, track_meta=False),
    ]


def random_transforms(flip: bool) -> list[Transform]:
    """Augmentation of a plain tensor (1, D, H, W).

    Pose, uneven gain (bias field), contrast, gain, noise and, if asked, the side.
    """
    keys = ["image"]
    steps: list[Transform] = [
        RandAffined(
            keys,
            prob=0.8,
            rotate_range=(0.06, 0.06, 0.06),  # rad, about 3.5 degrees
            translate_range=(2, 2, 2),  # voxels
            scale_range=(0.05, 0.05, 0.05),
            mode="bilinear",
            padding_mode="zeros",
        ),
        RandBiasFieldd(keys, prob=0.3, degree=2, coeff_range=(0.0, 0.1)),
        RandAdjustContrastd(keys, prob=0.3, gamma=(0.85, 1.2)),
        RandScaleIntensityd(keys, factors=0.1, prob=0.5),
        RandGaussianNoised(keys, prob=0.3, std=0.03),
    ]
    if flip:  # erases the difference between left and right, which is part of the disease
        steps.append(RandFlipd(keys, prob=0.5, spatial_axis=0))
    return [*steps, EnsureTyped(keys, dtype=torch.float32, track_meta=False)]
