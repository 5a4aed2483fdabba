"""Functions that TorchDynamo does not follow, written as Python that it follows.

They replace the originals while code is captured, or in captured code alone
(`torch.compiler.substitute_in_graph`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_hybrid._torch.capture import replaced
from lightning_hybrid._torch.modules import BatchNorm, check_dimensions, detects_causal_mask


@torch.compiler.substitute_in_graph(pow, can_constant_fold_through=True)
def _pow(base: Any, exp: Any, mod: Any = None) -> Any:
    """Python's ``pow``, by the operator ``**``, which TorchDynamo follows."""
    return operator.pow(base, exp) if mod is None else operator.pow(base, exp) % mod


@torch.compiler.substitute_in_graph(checkpoint_sequential, skip_signature_check=True)
def _checkpoint_sequential(
    functions: Any,
    segments: Any,
    input: Any,
    use_reentrant: Any = True,
    **options: Any,
) -> Any:
    """Run each segment but the last in a checkpointed region of its own, as torch does."""
    parts = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)

    def run_from(start: int, stop: int) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            for function in parts[start:stop]:
                value = function(value)
            return value

        return run

    # (the last segment is not checkpointed: its backward follows at once)
    size, start = len(parts) // segments, 0
    for _ in range(segments - 1):
        input = checkpoint(
            run_from(start, start + size),
            input,
            use_reentrant=use_reentrant,
            **options,
        )
        start += size
    return run_from(start, len(parts))(input)


def _detects_causal_mask(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Whether a mask is the causal one, for `torch.nn.TransformerEncoder` and the like.

    Torch compares the mask's numbers. Here it is so only if ``is_causal`` says it; else the mask is
    used as it is, which gives the same results, to rounding.
    """
    return is_causal is True


if detects_causal_mask is not None:
    torch.compiler.substitute_in_graph(detects_causal_mask, skip_signature_check=True)(
        _detects_causal_mask
    )


_jit_isinstance: Any = torch.jit.isinstance


def _isinstance(obj: Any, target_type: Any) -> bool:
    """`torch.jit.isinstance`; for classes (no generic types) as the built-in function."""
    kinds = target_type if isinstance(target_type, tuple) else (target_type,)
    if all(isinstance(kind, type) for kind in kinds):
        return isinstance(obj, kinds)
    return bool(_jit_isinstance(obj, target_type))


captured_classes = replaced(torch.jit, "isinstance", _isinstance)
"""Inside, TorchDynamo follows ``torch.jit.isinstance`` (no substitution in graphs is possible)."""


_batch_norm: Any = BatchNorm.forward


def _averaging(self: BatchNorm, input: Tensor) -> Tensor:
    """Batch normalisation with a cumulative average (``momentum=None``).

    Torch reads the number of batches, a tensor, as a Python number in each call, which cannot be
    captured. Here it stays a tensor, on the rank that owns it.
    """
    average = self.momentum is None and self.training and self.track_running_stats
    count, mean, variance = self.num_batches_tracked, self.running_mean, self.running_var
    captured = average and torch.compiler.is_compiling()
    if not captured or count is None or mean is None or variance is None:
        result: Tensor = _batch_norm(self, input)
        return result
    check_dimensions(self, input)
    # torch's own kernel takes no momentum that is a tensor: so it writes the statistics of this
    # batch to new tensors, which are averaged here
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


captured_averages = replaced(BatchNorm, "forward", _averaging)
"""Inside, TorchDynamo can follow a batch normalisation with ``momentum=None``."""
