from itertools import product

import torch
from torch import Tensor, nn

from models.maps.common import checked, class_indices, evaluation, scaled


class Occlusion3D:
    """Occlusion: how much the score of a class falls when a box of the volume is covered.

    A box of ``size`` voxels moves over the volume in steps of ``stride``; what it covers is set to
    ``fill``. Each voxel gets the mean fall of the class's score over the boxes that cover it;
    where the score rises instead, the map is 0. Needs neither gradients nor layers, and one
    forward pass per box: boxes that cover nothing but ``fill`` (air) are skipped.

    Args:
        network: Maps volumes (B, C, D, H, W) to scores (B, classes).
        size: Side of the box in voxels.
        stride: Step in voxels, at most ``size``.
        fill: What covered voxels become; 0 is the mean of the head in prepared scans, and air.
        at_once: Boxes per forward pass.

    Raises:
        ValueError: If size, stride or at_once is below 1, or stride above size.

    Reference:
        Zeiler and Fergus: Visualizing and Understanding Convolutional Networks, ECCV 2014.
    """

    def __init__(
        self,
        network: nn.Module,
        size: int = 6,
        stride: int = 3,
        fill: float = 0.0,
        at_once: int = 16,
    ) -> None:
        if not 1 <= stride <= size or at_once < 1:
            raise ValueError(
                f"Occlusion wants 1 <= stride <= size and at_once >= 1, got stride={stride}, "
                f"size={size}, at_once={at_once}."
            )
        self.network = network
        self.size = size
        self.stride = stride
        self.fill = fill
        self.at_once = at_once

    @torch.no_grad()
    def __call__(self, volume: Tensor, class_index: int | Tensor | None = None) -> Tensor:
        """Explain one batch; arguments, result and errors as those of `GradCAM3D`."""
        volume = checked(volume)
        with evaluation(self.network):
            scores = self.network(volume)
            index = class_indices(scores, class_index)
            maps = [
                self._of_one(sample, int(chosen), float(own[chosen]))
                for sample, chosen, own in zip(volume, index[:, 0], scores)
            ]
        return scaled(torch.stack(maps)[:, None].relu())

    def _of_one(self, sample: Tensor, chosen: int, score: float) -> Tensor:
        """Mean fall of the score at each voxel of one sample (C, D, H, W): (D, H, W)."""
        size = sample.shape[1:]
        fall = torch.zeros(size, device=sample.device)
        covered = torch.zeros(size, device=sample.device)
        boxes = self._boxes(size)
        full = [box for box in boxes if (sample[:, *box] != self.fill).any()]
        for box in boxes:
            covered[box] += 1
        for start in range(0, len(full), self.at_once):
            some = full[start : start + self.at_once]
            batch = sample.repeat(len(some), 1, 1, 1, 1)
            for changed, box in zip(batch, some):
                changed[:, *box] = self.fill
            for box, found in zip(some, self.network(batch)[:, chosen].tolist()):
                fall[box] += score - found
        return fall / covered

    def _boxes(self, size: torch.Size) -> list[tuple[slice, ...]]:
        """Boxes that cover the whole volume; the last of each axis ends at its border."""
        starts = []
        for length in size:
            last = max(length - self.size, 0)
            starts.append(sorted({*range(0, last, self.stride), last}))
        return [tuple(slice(at, at + self.size) for at in corner) for corner in product(*starts)]
