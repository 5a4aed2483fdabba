from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GradCAM3D:
    """3D Grad-CAM: where in the volume a class score of a network comes from.

    ``alpha_c`` is the mean over the three spatial axes of ``d score / d A_c``, A the output of
    ``layer``; the map is ``relu(sum_c alpha_c A_c)``, brought to the size of the input (trilinear,
    ``align_corners=False``) and divided by its maximum, sample by sample. A map that is zero
    everywhere stays zero.

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
        modules = dict(network.named_modules())
        if layer not in modules or not layer:
            names = [name for name in modules if name]
            close = get_close_matches(layer, names, n=3, cutoff=0.4) or names[:5]
            raise ValueError(
                f"The network has no layer {layer!r}; close to it: {', '.join(close)}."
            )
        self.network = network
        self.layer = layer
        self._module = modules[layer]

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
        if volume.ndim != 5:
            raise ValueError(
                f"Grad-CAM wants volumes (B, C, D, H, W), got shape {tuple(volume.shape)}."
            )
        with torch.inference_mode(False), torch.enable_grad():
            # a tensor made in inference mode can't take part in autograd; its copy can
            volume = volume.clone() if volume.is_inference() else volume.detach()
            with _evaluation(self.network), self._recorded() as activations:
                scores = self.network(volume)
            activation = self._only(activations)
            index = _class_indices(scores, class_index)
            # samples are independent in evaluation mode: the gradient of the sum is each one's own
            (gradient,) = torch.autograd.grad(scores.gather(1, index).sum(), activation)
        return _heatmap(activation.detach(), gradient, volume.shape[2:])

    @contextmanager
    def _recorded(self) -> Iterator[list[Tensor]]:
        """Collect the layer's outputs, each made the start of a new graph."""
        outputs: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            # nothing before the layer is needed, and a frozen network has no graph at all
            outputs.append(output.detach().requires_grad_())
            return outputs[-1]

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


@contextmanager
def _evaluation(network: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module gets its own mode back, frozen ones too."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _class_indices(scores: Tensor, class_index: int | Tensor | None) -> Tensor:
    """The class of each sample, as a column (B, 1)."""
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


def _heatmap(activation: Tensor, gradient: Tensor, size: torch.Size) -> Tensor:
    weights = gradient.float().mean(dim=(2, 3, 4), keepdim=True)
    cam = (weights * activation.float()).sum(dim=1, keepdim=True).relu()
    cam = F.interpolate(cam, size=tuple(size), mode="trilinear", align_corners=False)
    peak = cam.amax(dim=(1, 2, 3, 4), keepdim=True)
    return torch.where(peak > 0, cam / peak.clamp_min(torch.finfo(cam.dtype).tiny), cam)
