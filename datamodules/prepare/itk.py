"""Between arrays in RAS millimetres and images of SimpleITK, which lie in LPS and z, y, x."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DataError
from ..synth.grids import Array, Grid

_TO_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def simple_itk() -> Any:
    """The module SimpleITK.

    Raises:
        DataError: it is not installed.
    """
    try:
        import SimpleITK
    except ImportError:
        raise DataError(
            "NO_SIMPLEITK",
            "SimpleITK is not installed, which corrects bias fields and registers",
            action="pip install '.[prepare]'",
        ) from None
    return SimpleITK


def to_itk(values: Array, affine: Array) -> Any:
    """An image of float32 from an array (X, Y, Z) and its affine (4, 4) to RAS millimetres."""
    lps = _TO_LPS @ affine
    sizes = np.sqrt((lps[:3, :3] ** 2).sum(axis=0))
    image = simple_itk().GetImageFromArray(
        np.ascontiguousarray(values.transpose(2, 1, 0), dtype=np.float32)
    )
    image.SetSpacing(sizes.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / sizes).ravel().tolist())
    return image


def to_array(image: Any) -> Array:
    """The voxels (X, Y, Z) of an image."""
    return np.asarray(simple_itk().GetArrayFromImage(image).transpose(2, 1, 0))


def ras_of(transform: Any) -> Array:
    """The affine (4, 4) in RAS millimetres of a transform of SimpleITK that is linear."""
    ends = np.array([transform.TransformPoint(p) for p in ((0.0, 0.0, 0.0), *np.eye(3).tolist())])
    matrix = np.eye(4)
    matrix[:3, 3] = ends[0]
    matrix[:3, :3] = (ends[1:] - ends[0]).T
    return np.asarray(_TO_LPS @ matrix @ _TO_LPS)


def affine_of(ras: Array) -> Any:
    """The transform of SimpleITK with this affine (4, 4) in RAS millimetres."""
    lps = _TO_LPS @ ras @ _TO_LPS
    transform = simple_itk().AffineTransform(3)
    transform.SetMatrix(lps[:3, :3].ravel().tolist())
    transform.SetTranslation(lps[:3, 3].tolist())
    return transform


def resampled(image: Any, grid: Grid, ras: Array, *, cubic: bool) -> Array:
    """An image on another grid, read at ``ras`` (4, 4) times the grid's millimetres."""
    itk = simple_itk()
    like = to_itk(np.zeros(grid.shape, np.float32), grid.affine)
    how = itk.sitkBSpline if cubic else itk.sitkLinear
    return to_array(itk.Resample(image, like, affine_of(ras), how, 0.0))
