import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_MAP_BYTES = 2**30


class SelfAttention3D(nn.Module):
    """Self-attention over the voxels of a feature map, in the form of SAGAN.

    With ``N = D * H * W`` voxels ``x_i``: ``beta = softmax(query(x) @ key(x).T)`` over the keys and
    ``y = x + gamma * project(beta @ value(x))``, all four maps being 1x1x1 convolutions. ``gamma``
    is learnt and starts at 0, so that a fresh block is the identity.

    The N x N map is never stored: ``scaled_dot_product_attention`` works through it in tiles (scale
    1, as in SAGAN).

    Args:
        channels: Channels C of the input (B, C, D, H, W); the output has the same shape.
        reduction: The inner width is ``channels // reduction``.

    Raises:
        ValueError: If ``channels`` is smaller than ``reduction``.

    Reference:
        Zhang, Goodfellow, Metaxas, Odena: Self-Attention Generative Adversarial Networks, ICML
        2019. That 3D-ResAttNet uses this form (gamma = 0, reduction 8) is a reconstruction: its
        paper does not say.
    """

    def __init__(self, channels: int, reduction: int = 8) -> None:
        super().__init__()
        if channels < reduction:
            raise ValueError(
                f"SelfAttention3D: {channels} channels cannot be reduced by {reduction}; "
                "use more channels or a smaller `reduction`."
            )
        width = channels // reduction
        self.query = nn.Conv3d(channels, width, kernel_size=1)
        self.key = nn.Conv3d(channels, width, kernel_size=1)
        self.value = nn.Conv3d(channels, width, kernel_size=1)
        self.project = nn.Conv3d(width, channels, kernel_size=1)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x)
        mixed = F.scaled_dot_product_attention(
            _voxels(self.query(x)), _voxels(self.key(x)), _voxels(value), scale=1.0
        )
        mixed = mixed.transpose(-1, -2).reshape_as(value)
        out: Tensor = x + self.gamma * self.project(mixed)
        return out

    def attention_map(self, x: Tensor) -> Tensor:
        """The map beta itself, to look at: shape (B, N, N), each row sums to 1.

        Raises:
            ValueError: If the map would take more than ``MAX_MAP_BYTES``.
        """
        batch, voxels = x.shape[0], x[0, 0].numel()
        needed = batch * voxels**2 * x.element_size()
        if needed > MAX_MAP_BYTES:
            raise ValueError(
                f"The attention map of {batch} x {voxels} voxels (feature map {tuple(x.shape)}) "
                f"takes {needed / 2**30:.1f} GiB, more than {MAX_MAP_BYTES / 2**30:.1f} GiB; pass "
                "fewer samples, or look at a later layer. The forward pass needs no such map."
            )
        scores = _voxels(self.query(x)) @ _voxels(self.key(x)).transpose(-1, -2)
        weights: Tensor = scores.squeeze(1).softmax(dim=-1)
        return weights


def _voxels(x: Tensor) -> Tensor:
    """(B, C, D, H, W) to (B, 1, N, C): voxels as the tokens of one attention head."""
    return x.flatten(2).transpose(1, 2).unsqueeze(1)
