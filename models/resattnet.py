"""3D-ResAttNet, reconstructed from what its paper states.

Stated by the paper: Conv blocks of 3x3x3 convolution, batch normalisation and ReLU; residual layers
of two Conv blocks; residual self-attention blocks with 1x1x1 query, key, value and output
convolutions and a softmax; 18 and 34 layers; whole-brain volumes, end to end.

Not stated, and filled in here: stem, widths, strides and head as in ResNet; attention in the form
of SAGAN (inner width C/8, gamma that starts at 0) after layers 3 and 4, where its map is small;
initialisation (He et al. 2015, fan out, for convolutions without bias; batch normalisation at 1 and
0; torch's own for the attention and the linear layer); no dropout. Each of these is an option, or
can be seen in the code below.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv3d_weight_memory_format

from models.attention import AttentionKind, SelfAttention3D
from models.recompute import Normalise, called, recomputed

Depth = Literal[18, 34]
StemKernel = Literal[3, 5, 7]
StemStride = Literal[1, 2]

BLOCKS_PER_LAYER = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
WIDTHS = (64, 128, 256, 512)
LAYERS = (1, 2, 3, 4)
OPTIONS = (
    "depth",
    "in_channels",
    "stem_kernel",
    "stem_stride",
    "stem_pool",
    "widths",
    "attention_after",
    "attention_reduction",
    "attention",
    "dropout",
    "recompute",
    "channels_last",
)
"""Arguments of ``ResAttNet3D`` that are not of the task."""


class BasicBlock(nn.Module):
    """Residual layer of two Conv blocks: ``relu(conv_block(conv_block(x)) + shortcut(x))``.

    Args:
        in_channels: Channels of the input (B, C, D, H, W).
        out_channels: Channels of the output.
        stride: Stride of the first convolution; the output is ``ceil(size / stride)`` along each
            axis.
        recompute: Keep only the input for the backward pass and compute the rest again then: less
            memory, about a third more time.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
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
        if not self.recompute or not torch.is_grad_enabled():
            return self._forward(x, called)
        norms: list[nn.Module] = [self.bn1, self.bn2]
        if isinstance(self.shortcut, nn.Sequential):
            norms.append(self.shortcut[1])
        return recomputed(self._forward, norms, x)

    def _forward(self, x: Tensor, normalise: Normalise) -> Tensor:
        y = self.relu1(normalise(self.bn1, self.conv1(x)))
        y = normalise(self.bn2, self.conv2(y))
        side = x
        if isinstance(self.shortcut, nn.Sequential):
            side = normalise(self.shortcut[1], self.shortcut[0](x))
        out: Tensor = self.relu2(y + side)
        return out


class ResAttNet3D(nn.Sequential):
    """3D residual network with self-attention, from volumes to class scores.

    Its modules in order: ``stem``, ``layer1``, ``layer2``, ``layer3``, ``attention3``, ``layer4``,
    ``attention4``, ``pool``, ``flatten``, ``dropout`` (if any), ``classifier``. With the default
    stem the feature maps are smaller than the input by 4, 8, 16 and 32 after ``layer1`` to
    ``layer4``; each half of the stem that is left out (``stem_stride=1``, ``stem_pool=False``)
    makes them twice as fine, and the network about eight times as slow. Any input size is accepted,
    odd ones included.

    Args:
        depth: Layers on the main path with weights: 18 or 34.
        in_channels: Channels C of the input (B, C, D, H, W).
        num_classes: Columns of the output (B, num_classes), unnormalised scores.
        stem_kernel: Kernel of the first convolution: 3 as in the Conv blocks of the paper, 7 as in
            ResNet, or 5.
        stem_stride: Stride of the first convolution.
        stem_pool: Whether max pooling (3, stride 2) ends the stem.
        widths: Channels of the stem and of layers 1 to 4 (the stem has those of layer 1).
        attention_after: Layers (of 1 to 4) that a self-attention block follows; () gives a plain 3D
            ResNet.
        attention_reduction: The attention's inner width is its layer's divided by this.
        attention: "sdpa" stores no N x N map; "explicit" does, and refuses one that is too large.
        dropout: Probability that an input of the last linear layer is zeroed in training.
        recompute: Layers (of 1 to 4) whose blocks are computed again in the backward pass.
        channels_last: Whether weights and features lie in memory with the channels last, which
            is faster where torch has better kernels for it (``docs/measurements.md``).

    Raises:
        ValueError: If an option is none of those values.

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
        stem_kernel: StemKernel = 3,
        stem_stride: StemStride = 2,
        stem_pool: bool = True,
        widths: Sequence[int] = WIDTHS,
        attention_after: Collection[int] = (3, 4),
        attention_reduction: int = 8,
        attention: AttentionKind = "sdpa",
        dropout: float = 0.0,
        recompute: Collection[int] = (),
        channels_last: bool = False,
    ) -> None:
        _check_stem(stem_kernel, stem_stride)
        _check_layers(depth, widths, attention_after, recompute)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is a probability of 0 to below 1, not {dropout!r}.")
        modules: OrderedDict[str, nn.Module] = OrderedDict()
        modules["stem"] = _stem(in_channels, widths[0], stem_kernel, stem_stride, stem_pool)
        channels = widths[0]
        for number, width, blocks in zip(LAYERS, widths, BLOCKS_PER_LAYER[depth]):
            stride = 1 if number == 1 else 2
            modules[f"layer{number}"] = _layer(channels, width, blocks, stride, number in recompute)
            if number in attention_after:
                modules[f"attention{number}"] = SelfAttention3D(
                    width, attention_reduction, attention
                )
            channels = width
        modules["pool"] = nn.AdaptiveAvgPool3d(1)
        modules["flatten"] = nn.Flatten()
        if dropout:
            modules["dropout"] = nn.Dropout(dropout)
        modules["classifier"] = nn.Linear(channels, num_classes)
        super().__init__(modules)
        self.apply(_initialise)
        if channels_last:  # convolutions pass it on to their results
            convert_conv3d_weight_memory_format(self, torch.channels_last_3d)


def _check_stem(kernel: int, stride: int) -> None:
    if kernel not in (3, 5, 7):
        raise ValueError(
            f"The stem of ResAttNet3D has kernel 3, 5 or 7, not stem_kernel={kernel!r}."
        )
    if stride not in (1, 2):
        raise ValueError(f"The stem of ResAttNet3D has stride 1 or 2, not stem_stride={stride!r}.")


def _check_layers(
    depth: int, widths: Sequence[int], attention_after: Collection[int], recompute: Collection[int]
) -> None:
    if depth not in BLOCKS_PER_LAYER:
        raise ValueError(f"ResAttNet3D has {sorted(BLOCKS_PER_LAYER)} layers, not depth={depth!r}.")
    if len(widths) != len(LAYERS) or min(widths) < 1:
        raise ValueError(f"ResAttNet3D wants four widths, one per layer, not {list(widths)}.")
    for option, named in (("attention_after", attention_after), ("recompute", recompute)):
        unknown = sorted(set(named) - set(LAYERS))
        if unknown:
            raise ValueError(f"ResAttNet3D has layers 1 to 4; {option} names {unknown}.")


def _stem(in_channels: int, width: int, kernel: int, stride: int, pool: bool) -> nn.Sequential:
    modules: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv3d(in_channels, width, kernel, stride, padding=kernel // 2, bias=False),
        bn=nn.BatchNorm3d(width),
        relu=nn.ReLU(),
    )
    if pool:
        modules["pool"] = nn.MaxPool3d(3, 2, padding=1)
    return nn.Sequential(modules)


def _layer(
    in_channels: int, width: int, blocks: int, stride: int, recompute: bool
) -> nn.Sequential:
    first = BasicBlock(in_channels, width, stride, recompute)
    rest = (BasicBlock(width, width, 1, recompute) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


def _initialise(module: nn.Module) -> None:
    # the attention's 1x1x1 convolutions have biases and keep torch's own start
    if isinstance(module, nn.Conv3d) and module.bias is None:
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
