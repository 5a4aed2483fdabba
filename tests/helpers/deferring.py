"""Networks that are made without memory, and as one device makes them."""

from collections.abc import Callable

import torch
from torch import nn

from lightning_hybrid.remote.deferred_maker import DeferredMaker


def build(function: Callable[[], nn.Module]) -> tuple[nn.Module, DeferredMaker]:
    """A network whose tensors wait, as in ``configure_model``."""
    torch.manual_seed(5)
    root, deferral = nn.Module(), DeferredMaker(torch.device("cpu"))
    with deferral.building(root), torch.device("cpu"):
        root.net = function()
    return root.net, deferral


def made(function: Callable[[], nn.Module]) -> nn.Module:
    """The network that one device has."""
    torch.manual_seed(5)
    return function()


def pair() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
