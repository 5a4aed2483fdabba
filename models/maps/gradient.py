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
        index = _classes(self.network, volume, class_index)
        heatmap = _gradient(self.network, volume, index).abs().amax(dim=1, keepdim=True)
        return scaled(smoothed(heatmap, self.sigma))


class SmoothGrad3D:
    """The mean of the absolute input gradients of noisy copies of the volume.

    A gradient changes much between images that look alike; the mean over some of them does less.
    Like the gradient it has no sign. The noise is the same at each call.

    Args:
        network: Maps volumes (B, C, D, H, W) to scores (B, classes), two or more.
        copies: Number of noisy copies.
        noise: Standard deviation of the noise, as a share of the volume's range; voxels that are 0
            (air) get none.
        sigma: Standard deviation of the smoothing, in voxels; 0 for none.

    Reference:
        Smilkov et al.: SmoothGrad: removing noise by adding noise, arXiv 1706.03825, 2017.
    """

    def __init__(
        self, network: nn.Module, copies: int = 16, noise: float = 0.1, sigma: float = 1.5
    ) -> None:
        self.network = network
        self.copies = copies
        self.noise = noise
        self.sigma = sigma

    def __call__(self, volume: Tensor, class_index: int | Tensor | None = None) -> Tensor:
        """Explain one batch; arguments, result and errors as those of `GradCAM3D`."""
        index = _classes(self.network, volume, class_index)
        volume = checked(volume)
        width = self.noise * (volume.amax((1, 2, 3, 4)) - volume.amin((1, 2, 3, 4)))
        width = width.reshape(-1, 1, 1, 1, 1) * (volume != 0)
        draws = torch.Generator().manual_seed(0)
        total = torch.zeros_like(volume[:, :1], dtype=torch.float32)
        for _ in range(self.copies):
            # one for all samples: a map must not depend on its place in a batch
            noise = torch.randn((1, *volume.shape[1:]), generator=draws).to(volume)
            gradient = _gradient(self.network, volume + width * noise, index)
            total += gradient.abs().amax(dim=1, keepdim=True)
        return scaled(smoothed(total / self.copies, self.sigma))


class IntegratedGradients3D:
    """How much each voxel adds to the class's score, on the way from an empty image to the volume.

    The gradient is averaged over that straight way and multiplied with what was added. All voxels
    together make the difference of the scores of both ends. What speaks against the class is 0 in
    the map. An empty image is 0, in a prepared scan the mean of the head: evidence is what differs
    from it.

    Args:
        network: Maps volumes (B, C, D, H, W) to scores (B, classes), two or more.
        steps: Number of places on the way.
        sigma: Standard deviation of the smoothing, in voxels; 0 for none.

    Reference:
        Sundararajan, Taly, Yan: Axiomatic Attribution for Deep Networks, ICML 2017.
    """

    def __init__(self, network: nn.Module, steps: int = 24, sigma: float = 1.5) -> None:
        self.network = network
        self.steps = steps
        self.sigma = sigma

    def attributions(self, volume: Tensor, class_index: int | Tensor | None = None) -> Tensor:
        """(B, C, D, H, W), with their sign; arguments as those of `GradCAM3D`."""
        index = _classes(self.network, volume, class_index)
        volume = checked(volume)
        total = torch.zeros_like(volume, dtype=torch.float32)
        for step in range(self.steps):
            total += _gradient(self.network, volume * ((step + 0.5) / self.steps), index)
        return total / self.steps * volume

    def __call__(self, volume: Tensor, class_index: int | Tensor | None = None) -> Tensor:
        """Explain one batch; arguments, result and errors as those of `GradCAM3D`."""
        found = self.attributions(volume, class_index).sum(dim=1, keepdim=True)
        return scaled(smoothed(found, self.sigma).clamp_min(0))


def _classes(network: nn.Module, volume: Tensor, class_index: int | Tensor | None) -> Tensor:
    """The class of each sample (B, 1), found on the volume itself where none is given."""
    with torch.no_grad(), evaluation(network):
        return class_indices(network(checked(volume)), class_index)


def _gradient(network: nn.Module, volume: Tensor, index: Tensor) -> Tensor:
    """(B, C, D, H, W): of the class's score over the mean of the others'."""
    with torch.inference_mode(False), torch.enable_grad():
        volume = checked(volume).clone().requires_grad_()
        with evaluation(network):
            scores = network(volume)
        # an index that was made in inference mode cannot be saved for a backward pass
        own = scores.gather(1, index.clone())
        others = (scores.sum(dim=1, keepdim=True) - own) / max(scores.shape[1] - 1, 1)
        (gradient,) = torch.autograd.grad((own - others).sum(), volume)
    return gradient.float()


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
