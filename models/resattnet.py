"""3D-ResAttNet, reconstructed from what its paper states.

Stated by the paper: Conv blocks of 3x3x3 convolution, batch normalisation and ReLU; residual layers
of two Conv blocks; residual self-attention blocks with 1x1x1 query, key, value and output
convolutions; 18 and 34 layers. Not stated, and filled in here as in ResNet: stem, widths, strides,
place of the attention, head.
"""

from collections import OrderedDict
from collections.abc import Collection
from typing import Literal

from torch import Tensor, nn

from models.attention import SelfAttention3D

Depth = Literal[18, 34]

BLOCKS_PER_LAYER = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Residual layer of two Conv blocks: ``relu(conv_block(conv_block(x)) + shortcut(x))``.

    Args:
        in_channels: Channels of the input (B, C, D, H, W).
        out_channels: Channels of the output.
        stride: Stride of the first convolution; the output is ``ceil(size / stride)`` along each
            axis.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm3d(out_channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv3d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm3d(out_channels)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv3d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm3d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu2(y + self.shortcut(x))
        return out


class ResAttNet3D(nn.Sequential):
    """3D residual network with self-attention, from volumes to class scores.

    Its modules in order: ``stem``, ``layer1``, ``layer2``, ``layer3``, ``attention3``, ``layer4``,
    ``attention4``, ``pool``, ``flatten``, ``classifier``. The feature maps are smaller than the
    input by 4, 8, 16 and 32 after ``layer1`` to ``layer4``; any input size is accepted, odd ones
    included.

    Args:
        depth: Layers on the main path with weights: 18 or 34.
        in_channels: Channels C of the input (B, C, D, H, W).
        num_classes: Columns of the output (B, num_classes), unnormalised scores.
        stem_kernel: Kernel of the first convolution: 3 as in the Conv blocks of the paper, or 7 as
            in ResNet.
        attention_after: Layers (of 1 to 4) that a self-attention block follows; () gives a plain 3D
            ResNet.

    Raises:
        ValueError: If ``depth``, ``stem_kernel`` or ``attention_after`` is none of those values.

    Reference:
        Zhang et al.: 3D-ResAttNet, An Explainable 3D Residual Self-Attention Deep Neural Network
        for Joint Atrophy Localization and Alzheimer's Disease Diagnosis Using Structural MRI, IEEE
        JBHI 26(11):5289-5297, 2022. A reconstruction, see the docstring of the module.
    """

    def __init__(
        self,
        depth: Depth = 18,
        in_channels: int = 1,
        num_classes: int = 2,
        stem_kernel: Literal[3, 7] = 3,
        attention_after: Collection[int] = (3, 4),
    ) -> None:
        _check(depth, stem_kernel, attention_after)
        modules: OrderedDict[str, nn.Module] = OrderedDict()
        modules["stem"] = _stem(in_channels, stem_kernel)
        channels = WIDTHS[0]
        for number, (width, blocks) in enumerate(zip(WIDTHS, BLOCKS_PER_LAYER[depth]), start=1):
            modules[f"layer{number}"] = _layer(
                channels, width, blocks, stride=1 if number == 1 else 2
            )
            if number in attention_after:
                modules[f"attention{number}"] = SelfAttention3D(width)
            channels = width
        modules["pool"] = nn.AdaptiveAvgPool3d(1)
        modules["flatten"] = nn.Flatten()
        modules["classifier"] = nn.Linear(channels, num_classes)
        super().__init__(modules)
        self.apply(_initialise)


def _check(depth: int, stem_kernel: int, attention_after: Collection[int]) -> None:
    if depth not in BLOCKS_PER_LAYER:
        raise ValueError(f"ResAttNet3D has {sorted(BLOCKS_PER_LAYER)} layers, not depth={depth!r}.")
    if stem_kernel not in (3, 7):
        raise ValueError(
            f"The stem of ResAttNet3D has kernel 3 or 7, not stem_kernel={stem_kernel!r}."
        )
    unknown = sorted(set(attention_after) - {1, 2, 3, 4})
    if unknown:
        raise ValueError(f"ResAttNet3D has layers 1 to 4; attention_after names {unknown}.")


def _stem(in_channels: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv3d(in_channels, WIDTHS[0], kernel, 2, padding=kernel // 2, bias=False),
            bn=nn.BatchNorm3d(WIDTHS[0]),
            relu=nn.ReLU(),
            pool=nn.MaxPool3d(3, 2, padding=1),
        )
    )


def _layer(in_channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(in_channels, width, stride),
        *(BasicBlock(width, width, stride=1) for _ in range(blocks - 1)),
    )


def _initialise(module: nn.Module) -> None:
    # the attention's 1x1x1 convolutions have biases and keep torch's own start
    if isinstance(module, nn.Conv3d) and module.bias is None:
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
