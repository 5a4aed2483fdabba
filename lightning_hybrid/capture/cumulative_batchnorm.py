"""Batch normalisation with a cumulative average, as a graph.

With ``momentum=None`` torch reads the number of batches, a tensor, as a Python number in each call,
which cannot be captured. Here it stays a tensor, on the rank that owns it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid._torch.capture import Exchanged
from lightning_hybrid._torch.modules import BatchNorm, check_dimensions

_original: Any = BatchNorm.forward


def _forward(self: BatchNorm, input: Tensor) -> Tensor:
    average = self.momentum is None and self.training and self.track_running_stats
    count, mean, variance = self.num_batches_tracked, self.running_mean, self.running_var
    captured = average and torch.compiler.is_compiling()
    if not captured or count is None or mean is None or variance is None:
        result: Tensor = _original(self, input)
        return result
    check_dimensions(self, input)
    count.add_(1)
    # with a momentum of 1 they become the statistics of this batch
    now_mean, now_variance = torch.zeros_like(mean), torch.ones_like(variance)
    result = F.batch_norm(
        input, now_mean, now_variance, self.weight, self.bias, True, 1.0, self.eps
    )
    share = 1.0 / count.to(mean.dtype)
    mean.copy_(share * now_mean + (1.0 - share) * mean)
    variance.copy_(share * now_variance + (1.0 - share) * variance)
    return result


captured_averages = Exchanged(
    lambda: setattr(BatchNorm, "forward", _forward),
    lambda: setattr(BatchNorm, "forward", _original),
)
"""Inside, what captures a batch normalisation can follow it."""
