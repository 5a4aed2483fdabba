from typing import Any

import torch
from torch import Tensor, nn

from models.attention import SelfAttention3D
from models.maps.common import checked, evaluation, named_layer, to_size


class AttentionMap3D:
    """Where a self-attention layer looks: how much each voxel gives to all others, on average.

    The mean over the queries of the attention map beta, brought to the size of the input and
    divided by its maximum. It belongs to no class, and says nothing while the layer's ``gamma`` is
    0, since the network then ignores the layer: such a map is zero.

    Args:
        network: Maps volumes (B, C, D, H, W) to scores.
        layer: Dotted name of a `SelfAttention3D`, for instance "attention3".

    Raises:
        ValueError: If there is no such layer, or it is of another kind.
    """

    def __init__(self, network: nn.Module, layer: str = "attention4") -> None:
        module = named_layer(network, layer)
        if not isinstance(module, SelfAttention3D):
            known = [n for n, m in network.named_modules() if isinstance(m, SelfAttention3D)]
            raise ValueError(
                f"Layer {layer!r} is a {type(module).__name__}, not self-attention; the network's "
                f"attention layers: {', '.join(known) or 'none'}."
            )
        self.network = network
        self.layer = layer
        self._module = module

    @torch.no_grad()
    def __call__(self, volume: Tensor, class_index: int | Tensor | None = None) -> Tensor:
        """The map of one batch (B, C, D, H, W): (B, 1, D, H, W); ``class_index`` plays no part."""
        volume = checked(volume)
        inputs: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            inputs.append(args[0])

        handle = self._module.register_forward_hook(hook)
        try:
            with evaluation(self.network):
                self.network(volume)
                given = self._module.attention_map(inputs[0]).float().mean(dim=1)
        finally:
            handle.remove()
        used = (self._module.gamma != 0).to(given.dtype)
        heatmap = (given * used).reshape(-1, 1, *inputs[0].shape[2:])
        return to_size(heatmap, volume.shape[2:], self.network)
