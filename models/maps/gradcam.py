from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from models.maps.common import checked, class_indices, evaluation, named_layer, to_size


class GradCAM3D:
    """3D Grad-CAM: where in the volume a class score of a network comes from.

    ``alpha_c`` is the mean over the three spatial axes of ``d score / d A_c``, A the output of
    ``layer``; the map is ``relu(sum_c alpha_c A_c)``, brought to the size of the input (trilinear,
    each cell where the middle of its field of view lies) and divided by its maximum, sample by
    sample. A map that is zero everywhere stays zero.

    The network runs in evaluation mode and is left as it was found: modes, gradients and hooks.
    Works inside ``torch.no_grad()`` and ``torch.inference_mode()``, and for frozen networks.

    Args:
        network: Maps volumes (B, C, D, H, W) to scores (B, classes).
        layer: Dotted name of the module whose output is explained, for instance "layer4" or
            "layer3.1".

    Raises:
        ValueError: If the network has no module of that name.

    Reference:
        Selvaraju et al.: Grad-CAM, ICCV 2017, with pooling over three axes as in 3D-ResAttNet.
    """

    def __init__(self, network: nn.Module, layer: str = "layer4") -> None:
        self.network = network
        self.layer = layer
        self._module = named_layer(network, layer)

    def __call__(self, volume: Tensor, class_index: int | Tensor | None = None) -> Tensor:
        """Explain one batch.

        Args:
            volume: (B, C, D, H, W), on the device of the network.
            class_index: The class to explain: one for all samples, a tensor (B,) with one per
                sample, or None for the class that the network itself chooses.

        Returns:
            (B, 1, D, H, W), float32, between 0 and 1.

        Raises:
            ValueError: If shapes or class numbers do not fit.
            RuntimeError: If the layer did not run, or ran more than once, in a forward pass.
        """
        with torch.inference_mode(False), torch.enable_grad():
            volume = checked(volume)
            with evaluation(self.network), self._recorded() as activations:
                scores = self.network(volume)
            activation = self._only(activations)
            index = class_indices(scores, class_index)
            # samples are independent in evaluation mode: the gradient of the sum is each one's own
            (gradient,) = torch.autograd.grad(scores.gather(1, index).sum(), activation)
        activation, gradient = activation.detach().float(), gradient.float()
        weights = self._weights(activation, gradient)
        heatmap = (weights * activation).sum(dim=1, keepdim=True).relu()
        return to_size(heatmap, volume.shape[2:], self.network)

    def _weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        """Weights of the activations (B, C, d, h, w): alpha, (B, C, 1, 1, 1), or one per voxel."""
        return gradient.mean(dim=(2, 3, 4), keepdim=True)

    @contextmanager
    def _recorded(self) -> Iterator[list[Tensor]]:
        """Collect the layer's outputs, each made the start of a new graph."""
        outputs: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            # nothing before the layer is needed, and a frozen network has no graph at all
            outputs.append(output.detach().requires_grad_())
            # a layer that works in place would write over what was recorded
            return outputs[-1].clone()

        handle = self._module.register_forward_hook(hook)
        try:
            yield outputs
        finally:
            handle.remove()

    def _only(self, activations: list[Tensor]) -> Tensor:
        if len(activations) != 1:
            raise RuntimeError(
                f"Layer {self.layer!r} ran {len(activations)} times in one forward pass; "
                "Grad-CAM needs exactly one."
            )
        if activations[0].ndim != 5:
            raise ValueError(
                f"Layer {self.layer!r} puts out shape {tuple(activations[0].shape)}; "
                "Grad-CAM needs a feature map (B, C, D, H, W): choose an earlier layer."
            )
        return activations[0]


class HiResCAM3D(GradCAM3D):
    """3D HiResCAM: as Grad-CAM, but every voxel keeps its own gradient.

    The map is ``relu(sum_c d score / d A_c * A_c)``, voxel by voxel. Grad-CAM gives a channel the
    mean of its gradients everywhere, so that a channel that counts in one place lights up wherever
    it is active; in early layers, whose cells are small, that is nearly the whole head. Where the
    layers behind are linear, the map before its ReLU sums to the score without its bias.

    Reference:
        Draelos and Carin: Use HiResCAM instead of Grad-CAM for faithful explanations of
        convolutional neural networks, arXiv:2011.08891, 2020.
    """

    def _weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class GradCAMPlusPlus3D(GradCAM3D):
    """3D Grad-CAM++: as Grad-CAM, but each voxel of a gradient has a weight of its own.

    With ``g = d score / d A_c`` at a voxel: ``a = g² / (2 g² + g³ sum(A_c))`` (0 where g is 0) and
    ``alpha_c = sum(a relu(g))`` over the voxels. This takes the score's exponential for the class
    probability and the layers behind for piecewise linear, as the paper does. It shows several
    places at once where Grad-CAM prefers the largest.

    Reference:
        Chattopadhay et al.: Grad-CAM++, WACV 2018.
    """

    def _weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        whole = activation.sum(dim=(2, 3, 4), keepdim=True)
        # g² cancels, where it is not 0
        below = 2 + gradient * whole
        share = torch.where(below != 0, 1 / below, torch.zeros_like(below))
        return (share * gradient.relu()).sum(dim=(2, 3, 4), keepdim=True)
