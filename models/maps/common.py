from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import numpy as np
import torch
from torch import Tensor, nn


def named_layer(network: nn.Module, layer: str) -> nn.Module:
    """The module of that dotted name.

    Raises:
        ValueError: If there is none; the text has names close to it.
    """
    modules: dict[str, nn.Module] = dict(network.named_modules())
    if layer not in modules or not layer:
        names = [name for name in modules if name]
        close = get_close_matches(layer, names, n=3, cutoff=0.4) or names[:5]
        raise ValueError(f"The network has no layer {layer!r}; close to it: {', '.join(close)}.")
    return modules[layer]


def checked(volume: Tensor) -> Tensor:
    """A volume that can take part in autograd, cut off from whatever made it.

    Raises:
        ValueError: If it is not (B, C, D, H, W).
    """
    if volume.ndim != 5:
        raise ValueError(f"A map wants volumes (B, C, D, H, W), got shape {tuple(volume.shape)}.")
    # a tensor made in inference mode can't take part in autograd; its copy can
    return volume.clone() if volume.is_inference() else volume.detach()


@contextmanager
def evaluation(network: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module gets its own mode back, frozen ones too."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def class_indices(scores: Tensor, class_index: int | Tensor | None) -> Tensor:
    """The class of each sample, as a column (B, 1); None is the one of the highest score."""
    batch, classes = scores.shape
    if class_index is None:
        return scores.argmax(dim=1, keepdim=True)
    index = torch.as_tensor(class_index, device=scores.device)
    if index.ndim > 1 or index.numel() not in (1, batch):
        raise ValueError(
            f"class_index has shape {tuple(index.shape)}; give one, or one for each of {batch}."
        )
    if index.min() < 0 or index.max() >= classes:
        raise ValueError(
            f"class_index {index.tolist()} is outside 0..{classes - 1}, the network's classes."
        )
    return index.long().reshape(-1, 1).expand(batch, 1)


def to_size(heatmap: Tensor, size: torch.Size, network: nn.Module) -> Tensor:
    """Bring maps (B, 1, d, h, w) to a size (D, H, W), trilinear, and scale them.

    A cell is put where the middle of its field of view lies. Behind kernels of odd size that are
    padded by half of it, as in a ResNet, that is a multiple of the stride: with cells of 32 voxels,
    maps whose cells are spread evenly over the volume would lie 15 voxels too far along each axis.
    Those of networks with other kernels, such as DenseNet, are spread evenly.
    """
    centred = _is_centred(network)
    for axis, voxels in enumerate(size, start=2):
        low, share = _places(voxels, heatmap.shape[axis], centred)
        high = (low + 1).clamp_max(heatmap.shape[axis] - 1)
        near, far = (heatmap.index_select(axis, at.to(heatmap.device)) for at in (low, high))
        # a flat part stays flat to the bit: maps are compared by their ranks
        along = [-1 if dim == axis else 1 for dim in range(5)]
        heatmap = torch.lerp(near, far, share.to(heatmap).reshape(along))
    return scaled(heatmap)


def _is_centred(network: nn.Module) -> bool:
    """Whether all that take fewer places along an axis are odd in size and padded by half of it."""
    kinds = nn.Conv3d | nn.MaxPool3d | nn.AvgPool3d
    strided = (m for m in network.modules() if isinstance(m, kinds) and np.max(m.stride) > 1)
    return all(
        np.all(np.asarray(m.kernel_size) % 2 == 1)
        and np.all(np.asarray(m.kernel_size) // 2 == np.asarray(m.padding))
        for m in strided
    )


def _places(voxels: int, cells: int, centred: bool) -> tuple[Tensor, Tensor]:
    """The cell before each voxel of an axis, and how far the voxel lies on the way to the next."""
    stride = 1
    while -(-voxels // stride) > cells:
        stride *= 2
    at = torch.arange(voxels, dtype=torch.float64)
    centred = centred and -(-voxels // stride) == cells  # else strides are no powers of 2
    at = at / stride if centred else (at + 0.5) * cells / voxels - 0.5
    at = at.clamp(0, cells - 1)
    return at.long(), at.frac()


def scaled(heatmap: Tensor) -> Tensor:
    """Divide each map (B, 1, D, H, W) by its maximum; one of zeros stays zero."""
    peak = heatmap.amax(dim=(1, 2, 3, 4), keepdim=True)
    return torch.where(peak > 0, heatmap / peak.clamp_min(torch.finfo(heatmap.dtype).tiny), heatmap)


def is_empty(heatmap: Tensor) -> Tensor:
    """Which maps (B, 1, D, H, W) are zero everywhere: no evidence was found, shape (B,)."""
    return heatmap.flatten(1).abs().amax(dim=1) == 0
