"""Small networks with the habits of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Residual block with in-place ReLU and a shortcut, as in torchvision."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv3d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm3d(width)
        self.downsample = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(
                nn.Conv3d(width_in, width, 1, stride, bias=False), nn.BatchNorm3d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = out + (x if self.downsample is None else self.downsample(x))
        return self.relu(out)


class ResNet(nn.Module):
    """3D ResNet-18, narrow."""

    def __init__(self, width: int = 4, blocks: Sequence[int] = (2, 2, 2, 2)) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(1, width, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool3d(3, 2, 1)
        widths = [width, *(width * 2**i for i in range(len(blocks)))]
        for i, count in enumerate(blocks):
            first = Block(widths[i], widths[i + 1], 1 if i == 0 else 2)
            rest = [Block(widths[i + 1], widths[i + 1]) for _ in range(count - 1)]
            setattr(self, f"layer{i + 1}", nn.Sequential(first, *rest))
        self.depth = len(blocks)
        self.pool = nn.AdaptiveAvgPool3d(1)
        self.fc = nn.Linear(widths[-1], 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(self.depth):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(self.pool(x).view(x.shape[0], -1))


class UNet(nn.Module):
    """Skips across the depth, and Python control flow on odd sizes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down0 = nn.Conv2d(1, width, 3, padding=1)
        self.down1 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up0 = nn.Conv2d(2 * width, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down0(x))
        y = F.relu(self.down1(skip))
        y = self.up1(F.relu(self.bottom(y)))
        if y.shape != skip.shape:
            y = y[:, :, : skip.shape[2], : skip.size(3)]
        return self.up0(torch.cat([skip, y], dim=1))


class TwoInputs(nn.Module):
    """An image, numbers for each sample, weights for all samples, and a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
        self.table = nn.Linear(3, 4)
        self.head = nn.Linear(4 * 36 + 4, 2)

    def forward(
        self, image: Tensor, *, table: Tensor, weights: Tensor, scaled: bool = True
    ) -> dict[str, Tensor]:
        table = self.table(table)
        features = torch.cat([self.image(image), table], dim=1)
        logits = self.head(features)
        return {"logits": logits * weights if scaled else logits, "table": table, "image": image}


@dataclass
class Answer:
    mean: Tensor
    parts: list[Tensor]
    name: str = "answer"


class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Answer:
        x = self.one(x)
        low, high = x.chunk(2, dim=1)
        return Answer(self.two(x).mean(), [low, high])


class FunctionalDropout(nn.Module):
    """Reads ``self.training`` in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.one(x), 0.5, training=self.training)
        return F.dropout(self.two(x), 0.5 if self.training else 0.0)


class DropPath(nn.Module):
    """Other layers in training than in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.rand(x.shape[0], 1, device=x.device).round()


class ValueControl(nn.Module):
    """Control flow on values: cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x * 2 if x.sum() > 0 else x[:, :4] - 1


class Remembering(nn.Module):
    """Keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x)
        self.seen.append(self.last.detach())
        return self.last


class Around(nn.Module):
    """A module between two linear layers."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = middle
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decode(self.middle(self.encode(x))))


class Scaled(nn.Module):
    """Reads a parameter, a buffer and a constant itself, and makes tensors of the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))
        self.constant = torch.full((4,), 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch = x.size(0)
        x = self.one(x) * self.scale
        x = self.two(x) + self.shift * self.constant
        return x + torch.ones(batch, 1, device=x.device, dtype=x.dtype), self.scale
