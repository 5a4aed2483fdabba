"""A small MaxViT of torch's own modules, after Tu et al., "MaxViT: Multi-Axis Vision Transformer",
ECCV 2022: blocks of an inverted bottleneck, attention within windows, and attention over a grid.
"""

import torch
from torch import Tensor, nn


class Bottleneck(nn.Sequential):
    """Expand, depthwise convolution, squeeze and excite, project; with a skip connection."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        inner = 4 * width
        super().__init__(
            nn.BatchNorm2d(width_in),
            nn.Conv2d(width_in, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.GELU(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.GELU(),
            Excite(inner),
            nn.Conv2d(inner, width, 1),
        )
        self.skip = nn.Identity() if width_in == width else nn.Conv2d(width_in, width, 1)
        self.pool = nn.Identity() if stride == 1 else nn.AvgPool2d(stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for part in list(self)[:9]:
            y = part(y)
        return y + self.skip(self.pool(x))


class Excite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze, self.expand = nn.Linear(width, width // 16), nn.Linear(width // 16, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.expand(nn.functional.silu(self.squeeze(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


class Attention(nn.Module):
    """Attention among the places of a window, or among the places of a grid, which lie apart."""

    def __init__(self, width: int, window: int, *, grid: bool) -> None:
        super().__init__()
        self.window, self.grid, self.heads = window, grid, width // 16
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.bias = nn.Parameter(torch.zeros(self.heads, window**2, window**2))

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        p, h, w = self.window, H // self.window, W // self.window
        if self.grid:  # (B, C, p, h, p, w) -> (B, h, w, p, p, C)
            tokens = x.view(B, C, p, h, p, w).permute(0, 3, 5, 2, 4, 1)
        else:  # (B, C, h, p, w, p) -> (B, h, w, p, p, C)
            tokens = x.view(B, C, h, p, w, p).permute(0, 2, 4, 3, 5, 1)
        tokens = tokens.reshape(B * h * w, p * p, C)
        tokens = tokens + self.attend(self.norm(tokens))
        tokens = tokens + self.mlp(self.norm2(tokens))
        tokens = tokens.view(B, h, w, p, p, C)
        order = (0, 5, 3, 1, 4, 2) if self.grid else (0, 5, 1, 3, 2, 4)
        return tokens.permute(order).reshape(B, C, H, W)

    def attend(self, tokens: Tensor) -> Tensor:
        N, T, C = tokens.shape
        q, k, v = self.qkv(tokens).view(N, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        return self.out(mixed.transpose(1, 2).reshape(N, T, C))


class MaxViT(nn.Sequential):
    """Images (B, 3, H, W), H and W multiples of 32 x ``window``, to ``classes`` scores.

    Args:
        widths: channels per group of blocks; each halves the image.
        depths: blocks per group.
        window: side of a window, in places.
        classes: number of scores.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (32, 64, 128, 256),
        depths: tuple[int, ...] = (2, 2, 5, 2),
        window: int = 4,
        classes: int = 10,
    ) -> None:
        stem = [nn.Conv2d(3, widths[0], 3, 2, 1), nn.GELU()]
        blocks: list[nn.Module] = []
        before = widths[0]
        for width, depth in zip(widths, depths):
            for number in range(depth):
                blocks += [
                    Bottleneck(before, width, 2 if number == 0 else 1),
                    Attention(width, window, grid=False),
                    Attention(width, window, grid=True),
                ]
                before = width
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(before)]
        super().__init__(*stem, *blocks, *head, nn.Linear(before, classes))
