"""Functions that TorchDynamo does not follow, written as Python that it follows.

They replace the originals while code is captured, or in captured code alone
(`torch.compiler.substitute_in_graph`).

Torch's transformers have a fast path where nothing is trained. It makes one operation of an encoder
layer, or of attention, so that no cut would be possible where the graph for training has one. So
networks are captured with the fast path switched off; the ordinary path gives the same results, to
rounding. On the fast path ``torch.nn.TransformerEncoder`` also packs sequences whose mask is true
at their ends alone, and returns zeros for what is padded. For that it looks at the mask's values,
which it does not under TorchDynamo: it would return other numbers. Such a call is not captured.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid._torch.dynamo import FREE_CONVOLUTIONS, Replaced, stop_capture
from lightning_hybrid._torch.modules import BatchNorm, check_dimensions, detects_causal_mask
from lightning_hybrid.graph import FREE_SEQUENCES

_allow_in_graph: Any = torch.compiler.allow_in_graph


@torch.compiler.substitute_in_graph(pow, can_constant_fold_through=True)
def _pow(base: Any, exp: Any, mod: Any = None) -> Any:
    """Replaces Python's ``pow`` in captured code: TorchDynamo follows the operator ``**``."""
    return operator.pow(base, exp) if mod is None else operator.pow(base, exp) % mod


def _detects_causal_mask(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Replaces, in captured code, torch's test whether a transformer's mask is the causal one.

    Torch compares the mask's numbers. Here a mask is causal only if ``is_causal`` says so; else it
    is used as it is, which gives the same results, to rounding.
    """
    return is_causal is True


if detects_causal_mask is not None:
    torch.compiler.substitute_in_graph(detects_causal_mask, skip_signature_check=True)(
        _detects_causal_mask
    )


_jit_isinstance: Any = torch.jit.isinstance


def _isinstance(obj: Any, target_type: Any) -> bool:
    """Replaces `torch.jit.isinstance`: for classes it is the built-in ``isinstance``.

    Generic types (``List[Tensor]``) are left to torch's own function.
    """
    kinds = target_type if isinstance(target_type, tuple) else (target_type,)
    if all(isinstance(kind, type) for kind in kinds):
        return isinstance(obj, kinds)
    return bool(_jit_isinstance(obj, target_type))


_batch_norm: Any = BatchNorm.forward


def _averaging(self: BatchNorm, input: Tensor) -> Tensor:
    """Replaces ``forward`` of batch normalisation, for a cumulative average (``momentum=None``).

    Torch reads the number of batches, a tensor, as a Python number in each call, which cannot be
    captured. Here it stays a tensor, on the rank that owns it. In all other cases, and outside of
    captures, torch's own ``forward`` is called.
    """
    average = self.momentum is None and self.training and self.track_running_stats
    count = self.num_batches_tracked
    mean = self.running_mean
    variance = self.running_var
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


# ---------------------------------------------------------------- encoders of torch's transformers

PACKS = (
    "torch.nn.TransformerEncoder packs padded sequences where nothing is trained, which depends on "
    "the values of src_key_padding_mask. With enable_nested_tensor=False it does not"
)

_encode: Any = nn.TransformerEncoder.forward
_fast = True
"""Whether the user's setting allowed the fast path when the capture began."""


def _encoder(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    given = self, src, mask, src_key_padding_mask, is_causal
    # (a call in another thread, or in Python between the graphs of a chain)
    if not torch.compiler.is_compiling():
        return _not_captured(*given)
    if mask is None and src_key_padding_mask is not None and _may_pack(self, src):
        stop_capture(msg=PACKS)
        return _not_captured(*given)  # between the graphs of a chain
    return _encode(*given)


def _as_ever(*given: Any) -> Any:
    """Run the original ``forward`` of an encoder, with the user's setting of the fast path.

    Called for encoders that run as ordinary Python while another part is captured. Afterwards the
    fast path is off again, as captures need it.

    Args:
        given: the encoder, then the arguments of its ``forward`` in order.
    """
    torch.backends.mha.set_fastpath_enabled(_fast)
    try:
        return _encode(*given)
    finally:
        torch.backends.mha.set_fastpath_enabled(False)


_not_captured: Any = torch.compiler.disable(_as_ever)


def _may_pack(encoder: Any, src: Tensor) -> bool:
    """Whether torch itself would look at the values of the mask, to pack the sequences.

    (The conditions are torch's, in its order.)

    Args:
        encoder: a `torch.nn.TransformerEncoder`.
        src: its input.
    """
    first, packs = encoder.layers[0], getattr(encoder, "use_nested_tensor", False)
    if not _fast or not packs or first.training:
        return False
    looks = getattr(encoder, "mask_check", True)
    if src.dim() != 3 or not looks or torch.is_autocast_enabled():
        return False
    trained = src.requires_grad or any(p.requires_grad for p in first.parameters())
    return not (torch.is_grad_enabled() and trained)


class _Captured(Replaced):
    def put(self) -> None:
        global _fast
        super().put()
        _fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def back(self) -> None:
        super().back()
        torch.backends.mha.set_fastpath_enabled(_fast)


# (here, not where they are made: this loads TorchDynamo, and a process that only serves needs none)
for _, _, _layer in FREE_SEQUENCES:
    _allow_in_graph(_layer)

captured_functions = _Captured(
    (torch.jit, "isinstance", _isinstance),
    (BatchNorm, "forward", _averaging),
    (nn.TransformerEncoder, "forward", _encoder),
    FREE_CONVOLUTIONS,
    *FREE_SEQUENCES,
)
"""A context for captures, in which the listed attributes of torch are replaced, for all threads.

TorchDynamo follows the replacements. They are functions for which
`torch.compiler.substitute_in_graph` does not do. Torch's fast path for transformers is off inside.
"""
