"""Torch's transformer encoder on padded sequences, where nothing is trained.

``torch.nn.TransformerEncoder`` then packs sequences whose mask is true at their ends alone, and
returns zeros for what is padded. It looks at the mask's values for that, so that under TorchDynamo
it computes without packing, and returns other numbers there. Such a call is not captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.capture import stop_capture
from lightning_hybrid._torch.exchanged import Exchanged

PACKS = (
    "torch.nn.TransformerEncoder packs padded sequences where nothing is trained, which depends on "
    "the values of src_key_padding_mask. With enable_nested_tensor=False it does not"
)

_original: Any = nn.TransformerEncoder.forward


def _forward(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    padded = mask is None and src_key_padding_mask is not None
    if padded and torch.compiler.is_compiling() and _may_pack(self, src):
        stop_capture(msg=PACKS)
    result: Tensor = _original(self, src, mask, src_key_padding_mask, is_causal)
    return result


def _may_pack(encoder: Any, src: Tensor) -> bool:
    """Whether torch looks at the mask's values; its conditions, in its order."""
    first, packs = encoder.layers[0], getattr(encoder, "use_nested_tensor", False)
    if not torch.backends.mha.get_fastpath_enabled() or not packs or first.training:
        return False
    looks = getattr(encoder, "mask_check", True)
    if src.dim() != 3 or not looks or torch.is_autocast_enabled():
        return False
    trained = src.requires_grad or any(p.requires_grad for p in first.parameters())
    return not (torch.is_grad_enabled() and trained)


captured_encoders = Exchanged(
    lambda: setattr(nn.TransformerEncoder, "forward", _forward),
    lambda: setattr(nn.TransformerEncoder, "forward", _original),
)
"""Inside, an encoder that packs is not captured."""
