"""One loss scale for all stages (``precision="16-mixed"``).

The scaler lives on the driver. Gradients are unscaled where they are, and one that is not finite,
on any rank, makes the step be skipped on all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def unscale(gradients: Sequence[Tensor], factor: Tensor) -> bool:
    """Multiply gradients with ``factor``, in place. Whether one of them was not finite.

    Raises:
        ValueError: a gradient is float16, and would lose what scaling has saved.
    """
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise ValueError(
            "gradients in float16 cannot be unscaled: with precision='16-mixed' the weights are "
            "to be float32. Is a part of the network cast by hand (.half())?"
        )
    if not gradients:
        return False
    finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).all()
    factor = factor.to(gradients[0].device)
    for gradient in gradients:
        gradient.mul_(factor)
    return not bool(finite)
