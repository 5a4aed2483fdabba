"""What planning takes for many devices, in CPU seconds of one core.

* 3D-ResAttNet-34 on the 64 devices of `8x8-a100`, batches of 6: its capture, and after that the
  choice among all shapes (at most 10 s);
* a chain of 1,000 partitions of uneven cost on 1,024 devices, 8 a host, likewise (at most 60 s);
* a chain of 12 and of 38 partitions on 8 and on 64 devices of four speeds and two sizes of memory,
  whose shape, order, cuts, copies and shares are searched together (at most 10 s);
* one simulation with every event: 1,024 devices, 64 micro-batches (at most 10 s).

    python benchmarks/planning_speed.py
"""

import os
from collections.abc import Callable
from time import process_time
from typing import TypeVar

import numpy as np
import torch
from _results import record

from lightning_hybrid.asking.partition_costs import capture_call, counted_parts
from lightning_hybrid.graph import network_partitions
from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.shape_costs import CostsOf
from lightning_hybrid.planning.shapes import rank_shapes
from lightning_hybrid.planning.simulate import simulate
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.profiling import optimizer_bytes
from lightning_hybrid.schedules.gpipe import gpipe
from models import ResAttNet3D

VOLUMES = (6, 1, 91, 109, 91)
T = TypeVar("T")


def timed(what: str, action: Callable[[], T]) -> T:
    start_s = process_time()
    found = action()
    spent_s = process_time() - start_s
    record({what.strip(): spent_s}, "CPU s")
    print(f"{what}: {spent_s:.2f} CPU s", flush=True)
    return found


def resattnet(cluster: ClusterDescription) -> CostsOf:
    """The counted costs of 3D-ResAttNet-34."""
    with torch.device("meta"):
        network = ResAttNet3D(34)
        graph, _ = capture_call(network, (torch.empty(VOLUMES),), {})
    state = optimizer_bytes(network, [torch.optim.Adam(network.parameters())])
    rate = cluster.devices[0].flops_per_s
    return counted_parts(graph, network_partitions(graph), rate, state)


def chain(partitions: int) -> CostsOf:
    """A network of partitions whose costs are drawn."""
    rng = np.random.default_rng(0)
    forward_s = rng.lognormal(-7.0, 0.7, partitions)
    crossing = rng.uniform(1e4, 1e6, partitions)
    gradients = tuple(rng.integers(10**5, 10**7, partitions).tolist())

    def costs_of(samples: int) -> PartitionTable:
        crossing_bytes = tuple((samples * crossing).astype(int).tolist())
        return PartitionTable(
            names=tuple(f"layer{k}" for k in range(partitions)),
            layers=(1,) * partitions,
            parameters=tuple(size // 4 for size in gradients),
            forward_s=tuple((samples * forward_s).tolist()),
            backward_s=tuple((2 * samples * forward_s).tolist()),
            cut_bytes=crossing_bytes[:-1],
            gradient_bytes=gradients,
            kept_bytes=tuple(4 * size for size in gradients),
            activation_bytes=crossing_bytes,
        )

    return costs_of


def many_devices(count: int, *, unlike: bool = False) -> ClusterDescription:
    """Hosts of eight devices, which are all alike or differ in speed and memory."""
    kinds = ((1.0, 40e9), (0.43, 40e9), (0.8, 1e9), (0.16, 1e9)) if unlike else ((1.0, 40e9),)
    devices = tuple(
        DeviceSpec(name=f"kind {k}", flops_per_s=kinds[k][0], memory_bytes=kinds[k][1])
        for k in (number % len(kinds) for number in range(count))
    )
    levels = (
        Level(name="host", devices=8, bandwidth_bytes_per_s=2e11, latency_s=5e-6),
        Level(name="network", devices=count, bandwidth_bytes_per_s=1.2e10, latency_s=2e-5),
    )
    return ClusterDescription(name="many", devices=devices, levels=levels[: 1 + (count > 8)])


def main() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, one thread")
    torch.set_num_threads(1)
    a100 = ClusterDescription.load("8x8-a100")
    costs_of = timed("3D-ResAttNet-34, capture", lambda: resattnet(a100))
    ranked = timed("    planned for 64 devices", lambda: rank_shapes([costs_of], a100, VOLUMES[0]))
    print(f"    {len(ranked)} shapes, fastest: {ranked[0]}")
    costs_of, cluster = chain(1000), many_devices(1024)
    for batch in (6, 64):
        what = f"1,000 partitions planned for 1,024 devices, batches of {batch}"
        ranked = timed(what, lambda batch=batch: rank_shapes([costs_of], cluster, batch))
        print(f"    {len(ranked)} shapes, fastest: {ranked[0]}")
    for partitions, count in ((12, 8), (38, 8), (12, 64), (38, 64)):
        costs_of, cluster = chain(partitions), many_devices(count, unlike=True)
        what = f"{partitions} partitions planned for {count} unlike devices, batches of 12"
        ranked = timed(what, lambda c=costs_of, on=cluster: rank_shapes([c], on, 12))
        print(f"    {len(ranked)} shapes, fastest: {ranked[0]}")
    schedule = gpipe(1024, 64)
    costs = StepCosts(
        forward_s=[1e-3] * 1024,
        backward_s=[2e-3] * 1024,
        devices=range(1024),
        send_s=[1e-4] * 1023,
        latency_s=[1e-5] * 1023,
        step_s=[1e-3] * 1024,
    )
    what = "one simulation of 1,024 devices and 64 micro-batches"
    timed(what, lambda: simulate(schedule, costs))


if __name__ == "__main__":
    main()
