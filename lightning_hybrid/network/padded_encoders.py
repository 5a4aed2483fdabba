"""Torch's transformers where nothing is trained.

An encoder layer, and attention, then is one operation, which cannot be cut where training is. So
such calls are captured with torch's fast path switched off; it computes the same in another order.
With a padding mask it is left as it is: sequences that are padded as a whole become NaN there, and
zeros without it.

``torch.nn.TransformerEncoder`` then packs sequences whose mask is true at their ends alone, and
returns zeros for what is padded. It looks at the mask's values for that, so that under TorchDynamo
it computes without packing, and returns other numbers there. Such a call is not captured.
"""

from __future__ import annotations

from collections.abc import Mapping
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


_in_one = True
"""Whether a layer that is being captured may be one operation."""

_get_fastpath_enabled = torch.backends.mha.get_fastpath_enabled


def _fastpath_enabled() -> bool:
    return _get_fastpath_enabled() and (_in_one or not torch.compiler.is_compiling())


def _in_operations(original: Any, place: int, name: str) -> Any:
    """A forward that is captured operation by operation, unless it has a padding mask.

    Args:
        original: the forward.
        place: of its padding mask among the arguments behind ``self``.
        name: of its padding mask.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        global _in_one  # TorchDynamo does not follow set_fastpath_enabled
        padding = args[place] if len(args) > place else kwargs.get(name)
        if not torch.compiler.is_compiling() or padding is not None:
            return original(self, *args, **kwargs)
        before, _in_one = _in_one, False
        result = original(self, *args, **kwargs)
        _in_one = before
        return result

    return forward


_ORIGINALS = {
    nn.TransformerEncoder: _original,
    nn.TransformerEncoderLayer: nn.TransformerEncoderLayer.forward,
    nn.MultiheadAttention: nn.MultiheadAttention.forward,
}
_FORWARDS = {
    nn.TransformerEncoder: _forward,
    nn.TransformerEncoderLayer: _in_operations(
        nn.TransformerEncoderLayer.forward, 2, "src_key_padding_mask"
    ),
    nn.MultiheadAttention: _in_operations(nn.MultiheadAttention.forward, 3, "key_padding_mask"),
}


def _put(forwards: Mapping[type[nn.Module], Any], enabled: Any) -> None:
    torch.backends.mha.get_fastpath_enabled = enabled
    for kind, forward in forwards.items():
        setattr(kind, "forward", forward)  # noqa: B010


captured_encoders = Exchanged(
    lambda: _put(_FORWARDS, _fastpath_enabled), lambda: _put(_ORIGINALS, _get_fastpath_enabled)
)
"""Inside, an encoder that packs is not captured, and others are captured in operations."""
