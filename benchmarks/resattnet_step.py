"""One training step of 3D-ResAttNet-18 beside MONAI's 3D ResNet-18, in one run, with memory.

At 91 x 109 x 91 and batch 6, on whatever device there is. MONAI's stem is set to the same stride,
so that both have feature maps of the same sizes; steps alternate, so that other work on the machine
hits both alike. The same network in channels_last_3d and in bfloat16 (autocast) stands beside it,
to see whether either helps here. On a CPU the size can be made smaller: --size 46 55 46 --batch 2.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from _results import record
from monai.networks.nets import resnet18
from torch import Tensor, nn

from models import ResAttNet3D

REFERENCE = "MONAI resnet18"


@dataclass
class Subject:
    """One network with what its steps need."""

    network: nn.Module
    x: Tensor
    y: Tensor
    bfloat16: bool = False

    def __post_init__(self) -> None:
        self.network.to(self.x.device)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3, momentum=0.9)

    def loss(self) -> Tensor:
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.bfloat16):
            return nn.functional.cross_entropy(self.network(self.x), self.y)

    def timed_step_s(self) -> float:
        _wait(self.x.device)
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        _wait(self.x.device)
        return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def held_bytes(subject: Subject) -> int:
    """What the forward pass keeps for the backward pass, beside the weights; each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in subject.network.parameters()}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        loss = subject.loss()  # alive while counting, or storages would be used again
    total = sum(kept.values())
    del loss
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, nargs=3, default=[91, 109, 91])
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(chosen.batch, 1, *chosen.size, device=device)
    y = torch.arange(chosen.batch, device=device) % 2
    monai = resnet18(
        spatial_dims=3, n_input_channels=1, num_classes=2, conv1_t_size=3, conv1_t_stride=2
    )
    subjects = {
        REFERENCE: Subject(monai, x, y),
        "ResAttNet3D": Subject(ResAttNet3D(18), x, y),
        "  channels last": Subject(ResAttNet3D(18, channels_last=True), x, y),
        "  bfloat16": Subject(ResAttNet3D(18), x, y, bfloat16=True),
        "  both": Subject(ResAttNet3D(18, channels_last=True), x, y, bfloat16=True),
    }
    spent_s: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(chosen.steps + 1):
        for name, subject in subjects.items():
            found_s = subject.timed_step_s()
            if number:  # the first one warms up
                spent_s[name].append(found_s)
    record({name.strip(): statistics.median(times) for name, times in spent_s.items()}, "s")
    reference_s = statistics.median(spent_s[REFERENCE])
    for name, subject in subjects.items():
        median_s = statistics.median(spent_s[name])
        print(
            f"{name:16}{median_s:9.3f} s a step, {median_s / reference_s:5.2f} x MONAI's; "
            f"{held_bytes(subject) / 1e9:6.2f} GB of activations"
        )
