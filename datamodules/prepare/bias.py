"""The bias field: smooth differences in brightness that coils make (N4, Tustison et al. 2010)."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from ..synth.grids import Array
from ..voxels import tissue
from .itk import simple_itk, to_array, to_itk

_COARSE_MM = 6.0  # the field is smooth: it is estimated on a coarse copy
_ITERATIONS = [20, 20, 20]  # on three scales, each with twice the points of the one before


def bias_field(values: Array, affine: Array) -> Array:
    """The factor by which each voxel is too bright, (X, Y, Z) float32, 1 on average in the head.

    Args:
        values: (X, Y, Z), the background at 0.
        affine: (4, 4) voxels to RAS millimetres.
    """
    itk = simple_itk()
    sizes = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    head = np.asarray(ndimage.binary_closing(tissue(values), iterations=2))
    image = to_itk(values, affine)
    mask = itk.Cast(to_itk(head, affine), itk.sitkUInt8)
    factors = [max(1, round(_COARSE_MM / size)) for size in sizes]
    corrector = itk.N4BiasFieldCorrectionImageFilter()
    corrector.SetNumberOfThreads(1)  # sums of several threads differ in their last digits
    corrector.SetMaximumNumberOfIterations(_ITERATIONS)
    corrector.Execute(itk.Shrink(image, factors), itk.Shrink(mask, factors))
    field = to_array(corrector.GetLogBiasFieldAsImage(image))
    return np.asarray(np.exp(field - field[head].mean()), np.float32)
