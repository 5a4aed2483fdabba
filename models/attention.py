from typing import Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

AttentionKind = Literal["sdpa", "explicit"]

MAX_MAP_BYTES = 2**28
"""Largest N x N map of one sample that is ever stored."""


class SelfAttention3D(nn.Module):
    """Self-attention over the voxels of a feature map, in the form of SAGAN.

    With ``N = D * H * W`` voxels ``x_i``: ``beta = softmax(query(x) @ key(x).T)`` over the keys and
    ``y = x + gamma * project(beta @ value(x))``, all four maps being 1x1x1 convolutions. ``gamma``
    is learnt and starts at 0, so that a fresh block is the identity. The convolutions keep torch's
    own initialisation.

    Memory: "explicit" stores scores and beta, 2 N² numbers per sample, for the backward pass.
    "sdpa" calls `scaled_dot_product_attention` with scale 1 (SAGAN does not divide by a root).
    Torch's fused kernels work through the map in tiles and store query, key, value, the result and
    one number per query, so the map never exists. They are there for CPUs and CUDA; where torch has
    none it falls back to the explicit formula and its memory.

    Args:
        channels: Channels C of the input (B, C, D, H, W); the output has the same shape.
        reduction: The inner width is ``channels // reduction``.
        kind: How beta @ value is computed. Both give the same numbers up to rounding.

    Raises:
        ValueError: If ``channels`` is smaller than ``reduction``, ``kind`` is unknown, or an
            explicit map would be larger than ``MAX_MAP_BYTES`` per sample.

    Reference:
        Zhang, Goodfellow, Metaxas, Odena: Self-Attention Generative Adversarial Networks, ICML
        2019. That 3D-ResAttNet uses this form (gamma = 0, reduction 8) is a reconstruction: its
        paper does not say.
    """

    def __init__(self, channels: int, reduction: int = 8, kind: AttentionKind = "sdpa") -> None:
        super().__init__()
        if not 1 <= reduction <= channels:
            raise ValueError(
                f"SelfAttention3D: {channels} channels cannot be reduced by {reduction}; "
                "use more channels or a smaller `reduction`, at least 1."
            )
        if kind not in ("sdpa", "explicit"):
            raise ValueError(f"SelfAttention3D knows kind 'sdpa' or 'explicit', not {kind!r}.")
        width = channels // reduction
        self.kind = kind
        self.query = nn.Conv3d(channels, width, kernel_size=1)
        self.key = nn.Conv3d(channels, width, kernel_size=1)
        self.value = nn.Conv3d(channels, width, kernel_size=1)
        self.project = nn.Conv3d(width, channels, kernel_size=1)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x)
        if self.kind == "explicit":
            mixed = self.attention_map(x).unsqueeze(1) @ _voxels(value)
        else:
            mixed = F.scaled_dot_product_attention(
                _voxels(self.query(x)), _voxels(self.key(x)), _voxels(value), scale=1.0
            )
        mixed = mixed.transpose(-1, -2).reshape_as(value)
        out: Tensor = x + self.gamma * self.project(mixed)
        return out

    def attention_map(self, x: Tensor) -> Tensor:
        """The map beta itself: shape (B, N, N), each row sums to 1.

        Raises:
            ValueError: If the map would take more than ``MAX_MAP_BYTES`` per sample.
        """
        _refuse_large_map(x)
        scores = _voxels(self.query(x)) @ _voxels(self.key(x)).transpose(-1, -2)
        weights: Tensor = scores.squeeze(1).softmax(dim=-1)
        return weights


@fx.wrap  # a symbolic trace records the call instead of looking at sizes
def _refuse_large_map(x: Tensor) -> None:
    depth, height, width = x.shape[2:]
    voxels = depth * height * width
    needed = voxels**2 * x.element_size()
    if needed > MAX_MAP_BYTES:
        raise ValueError(
            f"The attention map of {voxels} voxels (feature map {tuple(x.shape)}) takes "
            f"{needed / 2**30:.2f} GiB per sample, more than {MAX_MAP_BYTES / 2**30:.2f} GiB. Use "
            "attention='sdpa', which stores no map, attention after a later layer, or smaller "
            "volumes."
        )


def _voxels(x: Tensor) -> Tensor:
    """(B, C, D, H, W) to (B, 1, N, C): voxels as the tokens of one attention head."""
    # contiguous: torch's fused kernels refuse others and the fallback stores the N x N map
    return x.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
