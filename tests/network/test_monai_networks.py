"""The slow tier: networks that people use, cut in two and three, compute what they computed."""

from collections.abc import Callable

import pytest
import torch
from monai.networks import nets
from torch import Tensor, nn

from lightning_hybrid.network import check, cut, network_partitions, trace

pytestmark = pytest.mark.conformance

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet18": (lambda: nets.resnet18(n_input_channels=1, num_classes=2), (2, 1, 32, 32, 32)),
    "DenseNet121": (
        lambda: nets.DenseNet121(spatial_dims=3, in_channels=1, out_channels=2),
        (2, 1, 32, 32, 32),
    ),
    "UNet": (
        lambda: nets.UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
        (2, 1, 32, 32, 32),
    ),
    # odd sizes take another branch
    "BasicUNet": (lambda: nets.BasicUNet(features=(8, 8, 16, 16, 32, 8)), (2, 1, 33, 35, 37)),
    "SegResNet": (lambda: nets.SegResNet(init_filters=8), (2, 1, 32, 32, 32)),
    "VNet": (lambda: nets.VNet(), (2, 1, 32, 32, 32)),
    "AttentionUnet": (
        lambda: nets.AttentionUnet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2)),
        (2, 1, 32, 32, 32),
    ),
    "HighResNet": (lambda: nets.HighResNet(in_channels=1, out_channels=2), (2, 1, 16, 16, 16)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("stages", [2, 3])
def test_a_cut_network_has_the_outputs_of_the_whole(name: str, stages: int) -> None:
    make, size = NETWORKS[name]
    torch.manual_seed(0)
    network = make().train()
    graph = trace(network, (torch.empty(size, device="meta"),))
    partitions = network_partitions(graph)
    assert len(partitions) >= stages
    boundaries = [len(partitions) * stage // stages for stage in range(1, stages)]
    parts = cut(graph, partitions, boundaries)
    assert all(next(part.parameters(), None) is not None for part in parts)
    other_batch: Tensor = torch.randn(3, *size[1:])
    check(graph, parts, (other_batch,))
    network.eval()
    check(graph, parts, (other_batch,))
