"""Ten problems of the planner: networks on four and eight devices that are not alike."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from random_clusters import FLOPS_PER_S, given, resattnet

from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.shape_costs import CostsOf


def vgg16() -> CostsOf:
    """Of operations and parameters counted by hand, on images of 224 x 224."""
    widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    pooled, size, before = (1, 3, 6, 9, 12), 224, 3
    flops, weights, crossing = [], [], []
    for number, width in enumerate(widths):
        weights.append(9 * before * width)
        flops.append(2 * weights[-1] * size**2)
        size, before = size // 2 if number in pooled else size, width
        crossing.append(width * size**2)
    for inputs, outputs in ((25088, 4096), (4096, 4096), (4096, 1000)):
        weights.append(inputs * outputs)
        flops.append(2 * weights[-1])
        crossing.append(outputs)
    seconds, crossing_bytes = np.array(flops) / FLOPS_PER_S, 4.0 * np.array(crossing[:-1])
    return given(seconds, crossing_bytes, 4.0 * np.array(weights))


def transformer(width: int = 768, tokens: int = 256, words: int = 32_000) -> CostsOf:
    """Twelve layers between an embedding and a head, 134 million parameters."""
    weights = np.array([words * width, *[12 * width**2] * 12, words * width], dtype=float)
    flops = 2 * tokens * weights + np.array([0, *[4 * tokens**2 * width] * 12, 0])
    flops[0] = 0
    crossing, outputs = np.full(13, 4.0 * tokens * width), 4.0 * tokens * words
    return given(flops / FLOPS_PER_S, crossing, 4 * weights, outputs)


def speeds_on(speeds: Sequence[float], network: float, hosts_of: int = 1) -> ClusterDescription:
    """Devices of these speeds, so many a host, with PCIe inside and so many bytes/s outside."""
    inside = Level(
        name="host", devices=hosts_of, bandwidth_bytes_per_s=1.2e10, latency_s=1e-5
    )  # fmt: skip
    outside = Level(name="network", devices=8, bandwidth_bytes_per_s=network, latency_s=5e-5)
    levels = (inside,) if hosts_of >= len(speeds) else (inside, outside)
    devices = tuple(DeviceSpec(name=f"of {s}", flops_per_s=s * FLOPS_PER_S) for s in speeds)
    return ClusterDescription(
        name="joint", devices=devices, levels=levels if hosts_of > 1 else (outside,)
    )


FOUR = (1.0, 1.0, 0.7, 0.7, 0.43, 0.43, 0.16, 0.16)
EVEN, UNEVEN = (1.0, 1.0, 0.43, 0.43), (1.0, 0.43, 0.43, 0.16)
PROBLEMS: dict[str, tuple[str, ClusterDescription]] = {
    "ResAttNet-18, 1, 1, .5, .5, 10 GbE": ("r18", speeds_on((1.0, 1.0, 0.5, 0.5), 1.25e9)),
    "ResAttNet-18, 1, 1, .43, .43, PCIe": ("r18", speeds_on(EVEN, 0, 4)),
    "ResAttNet-18, 1, .43, .43, .16, PCIe": ("r18", speeds_on(UNEVEN, 0, 4)),
    "transformer, 1, .43, .43, .16, PCIe": ("transformer", speeds_on(UNEVEN, 0, 4)),
    "VGG-16, 1, 1, .4, .4, 25 Gb/s": ("vgg", speeds_on((1.0, 1.0, 0.4, 0.4), 3.1e9)),
    "VGG-16, 4 and 4 at .4, 25 Gb/s": ("vgg", speeds_on((1.0,) * 4 + (0.4,) * 4, 3.1e9)),
    "VGG-16, 8 of four speeds, 25 Gb/s": ("vgg", speeds_on(FOUR, 3.1e9)),
    "ResAttNet-18, 8 of four speeds, 4 hosts, 10 GbE": ("r18", speeds_on(FOUR, 1.25e9, 2)),
    "transformer, 8 of four speeds, 4 hosts, 10 GbE": ("transformer", speeds_on(FOUR, 1.25e9, 2)),
    "ResAttNet-34, 8 of four speeds, 4 hosts, 10 GbE": ("r34", speeds_on(FOUR, 1.25e9, 2)),
}
NETWORKS: dict[str, Callable[[], CostsOf]] = {
    "r18": resattnet, "r34": partial(resattnet, 34), "vgg": vgg16, "transformer": transformer,
}  # fmt: skip
