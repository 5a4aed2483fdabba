"""One training step of 3D-ResAttNet-18 beside MONAI's 3D ResNet-18, in one run, with memory.

At 91 x 109 x 91 and batch 6, on whatever device there is. MONAI's stem is set to the same stride,
so that both have feature maps of the same sizes; steps alternate, so that other work on the machine
hits both alike. On a CPU the size can be made smaller: --size 46 55 46 --batch 2.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from monai.networks.nets import resnet18
from torch import Tensor, nn

from models import ResAttNet3D


def step(network: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(x), y).backward()
    optimizer.step()


def timed_s(*arguments: Any) -> float:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    step(*arguments)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def held_bytes(network: nn.Module, x: Tensor) -> int:
    """What the forward pass keeps for the backward pass, beside the weights; each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        output = network(x)  # alive while counting, or storages would be used again
    total = sum(kept.values())
    del output
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, nargs=3, default=[91, 109, 91])
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    networks = {
        "ResAttNet3D": ResAttNet3D(18),
        "MONAI resnet18": resnet18(
            spatial_dims=3, n_input_channels=1, num_classes=2, conv1_t_size=3, conv1_t_stride=2
        ),
    }
    x = torch.randn(chosen.batch, 1, *chosen.size, device=device)
    y = torch.arange(chosen.batch, device=device) % 2
    steps = {
        name: (n.to(device), torch.optim.SGD(n.parameters(), lr=1e-3, momentum=0.9), x, y)
        for name, n in networks.items()
    }
    spent_s: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(chosen.steps + 1):
        for name, arguments in steps.items():
            found_s = timed_s(*arguments)
            if number:  # the first one warms up
                spent_s[name].append(found_s)
    reference_s = statistics.median(spent_s["MONAI resnet18"])
    for name, times in spent_s.items():
        median_s = statistics.median(times)
        held = held_bytes(networks[name], x) / 1e9
        print(
            f"{name:16}{median_s:9.3f} s a step, {median_s / reference_s:5.2f} x MONAI's; "
            f"{held:6.2f} GB of activations"
        )
