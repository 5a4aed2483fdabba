"""Captures of torch's transformers where nothing is trained.

There torch's fast path makes one operation of an encoder layer, or of attention, in which no cut is
possible, though training has one there. So networks are captured with the fast path switched off;
it computes the same in another order.

``torch.nn.TransformerEncoder`` also packs sequences there whose mask is true at their ends alone,
and returns zeros for what is padded. For that it looks at the mask's values, so that under
TorchDynamo it computes without packing, and returns other numbers. Such a call is not captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.capture import Exchanged, stop_capture

PACKS = (
    "torch.nn.TransformerEncoder packs padded sequences where nothing is trained, which depends on "
    "the values of src_key_padding_mask. With enable_nested_tensor=False it does not"
)

_original: Any = nn.TransformerEncoder.forward
_fast = True
"""Whether the user allowed the fast path when the capture began."""


def _forward(
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
    return _original(*given)


def _as_ever(*given: Any) -> Any:
    """Run an encoder with the fast path switched as the user has it."""
    torch.backends.mha.set_fastpath_enabled(_fast)
    try:
        return _original(*given)
    finally:
        torch.backends.mha.set_fastpath_enabled(False)


_not_captured: Any = torch.compiler.disable(_as_ever)


def _may_pack(encoder: Any, src: Tensor) -> bool:
    """Whether torch would look at the mask's values, to pack; its conditions, in its order."""
    first, packs = encoder.layers[0], getattr(encoder, "use_nested_tensor", False)
    if not _fast or not packs or first.training:
        return False
    looks = getattr(encoder, "mask_check", True)
    if src.dim() != 3 or not looks or torch.is_autocast_enabled():
        return False
    trained = src.requires_grad or any(p.requires_grad for p in first.parameters())
    return not (torch.is_grad_enabled() and trained)


def _put() -> None:
    global _fast
    _fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    nn.TransformerEncoder.forward = _forward  # type: ignore[method-assign]


def _put_back() -> None:
    nn.TransformerEncoder.forward = _original  # type: ignore[method-assign]
    torch.backends.mha.set_fastpath_enabled(_fast)


captured_encoders = Exchanged(_put, _put_back)
"""Inside, a call of an encoder that packs is not captured; others are, without the fast path."""
