import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.maps.common import checked, class_indices, evaluation, scaled


class InputGradient3D:
    """Where a small change of the volume would change the class most: the input gradient, smoothed.

    The absolute gradient of the class's score over the mean of the others' with respect to each
    voxel, the largest of the channels, smoothed with a Gaussian. Its grid is the input's, so it
    can point where the cells of a late layer are too large; it has no sign, and shows what the
    network is sensitive to, not what speaks for the class.

    Args:
        network: Maps volumes (B, C, D, H, W) to scores (B, classes), two or more.
        sigma: Standard deviation of the smoothing, in voxels; 0 for none.

    Reference:
        Simonyan, Vedaldi, Zisserman: Deep Inside Convolutional Networks, ICLR workshop 2014.
    """

    def __init__(self, network: nn.Module, sigma: float = 1.5) -> None:
        if sigma < 0:
            raise ValueError(f"sigma is a width in voxels, 0 or more, not {sigma!r}.")
        self.network = network
        self.sigma = sigma

    def __call__(self, volume: Tensor, class_index: int | Tensor | None = None) -> Tensor:
        """Explain one batch; arguments, result and errors as those of `GradCAM3D`."""
        with torch.inference_mode(False), torch.enable_grad():
            volume = checked(volume).clone().requires_grad_()
            with evaluation(self.network):
                scores = self.network(volume)
            index = class_indices(scores, class_index)
            own = scores.gather(1, index)
            others = (scores.sum(dim=1, keepdim=True) - own) / max(scores.shape[1] - 1, 1)
            (gradient,) = torch.autograd.grad((own - others).sum(), volume)
        heatmap = gradient.float().abs().amax(dim=1, keepdim=True)
        return scaled(smoothed(heatmap, self.sigma))


def smoothed(heatmap: Tensor, sigma: float) -> Tensor:
    """Gaussian smoothing of maps (B, 1, D, H, W), cut off at three ``sigma`` voxels; 0 outside."""
    reach = int(3 * sigma + 0.5)
    if not reach:
        return heatmap
    at = torch.arange(-reach, reach + 1, dtype=heatmap.dtype, device=heatmap.device)
    kernel = torch.exp(-0.5 * (at / sigma) ** 2)
    kernel = kernel / kernel.sum()
    for axis in range(3):
        shape, padding = [1, 1, 1, 1, 1], [0, 0, 0]
        shape[2 + axis], padding[axis] = len(kernel), reach
        heatmap = F.conv3d(heatmap, kernel.reshape(shape), padding=padding)
    return heatmap
