"""Is the plan of `lightning-hybrid plan` the best of all? On 30 random clusters of unlike devices.

Each has 2 to 8 devices of up to four speeds and sizes of memory, in hosts of two or four, and plans
one of four networks in turn: 3D-ResAttNet-18 with counted operations, and three that are drawn:
parameters behind (as with a fully connected head), equal blocks (as of a transformer), and random
ones. Neighbouring partitions are joined until twelve are left.

Up to four devices every arrangement that the strategy can run is gone through: devices and their
order, replicas, stages, rounds of a loop, copies, micro-batches, recomputation, all cuts, the best
shares. (Those whose busiest devices alone would take longer than the best so far are left out.)
Above four the search for a better one has two to four times the evaluations of the planner, in
descents from its answer and from random arrangements, which are bred as well; the best of these may
not be the best there is. All times are simulated.

    python benchmarks/random_clusters.py [CLUSTER ...]
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import combinations, permutations
from math import inf
from time import process_time

import numpy as np
import torch
from _results import record

from lightning_hybrid.allocation.black_box_gabra import Breeding, descend, evolve, run_counted
from lightning_hybrid.asking.partition_costs import capture_call, counted_parts
from lightning_hybrid.errors import AllocationError
from lightning_hybrid.graph import network_partitions
from lightning_hybrid.planning import PartitionTable
from lightning_hybrid.planning.arrangements import Arrangement, Arrangements
from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.shape_costs import CostsOf
from lightning_hybrid.planning.shapes import rank_shapes, recommended
from lightning_hybrid.profiling import optimizer_bytes
from models import ResAttNet3D

BATCH = 12
PARTITIONS = 12
FLOPS_PER_S = 10e12
EXHAUSTIVE = 4
"""Devices up to which all arrangements are gone through."""
LONG = 80_000
"""Evaluations of the search above that, divided by the devices."""


def joined(table: PartitionTable, count: int = PARTITIONS) -> PartitionTable:
    """The same network in so many partitions: neighbours that do least together are one."""
    groups = [[k] for k in range(len(table.names))]
    while len(groups) > count:
        work = [sum(table.loads[k] for k in group) for group in groups]
        place = min(range(len(groups) - 1), key=lambda k: work[k] + work[k + 1])
        groups[place : place + 2] = [groups[place] + groups[place + 1]]

    def sums(values: object) -> list[float]:
        return [sum(values[k] for k in group) for group in groups] if len(values) else []

    return PartitionTable(
        names=[table.names[group[0]] for group in groups],
        cut_bytes=[table.cut_bytes[group[-1]] for group in groups[:-1]],
        output_bytes=table.output_bytes,
        **{
            name: sums(getattr(table, name))
            for name in (
                *("forward_s", "backward_s", "parameters", "layers", "gradient_bytes"),
                *("kept_bytes", "activation_bytes", "step_s"),
            )
        },
    )


def resattnet(depth: int = 18) -> CostsOf:
    """The counted costs of 3D-ResAttNet at the size of a brain at 2 mm."""
    with torch.device("meta"):
        network = ResAttNet3D(depth)
        graph, _ = capture_call(network, (torch.empty(BATCH, 1, 91, 109, 91),), {})
    state = optimizer_bytes(network, [torch.optim.Adam(network.parameters())])
    counted = counted_parts(graph, network_partitions(graph), FLOPS_PER_S, state)
    return lambda samples: joined(counted(samples))


def drawn(kind: str) -> CostsOf:
    """A network whose costs are drawn."""
    rng, n = np.random.default_rng(len(kind)), PARTITIONS
    work, crossing, weights = np.full(n, 2e-3), np.full(n - 1, 1e6), np.full(n, 3e7)
    if kind == "parameters behind":
        work, crossing = np.geomspace(6e-3, 2e-4, n), np.geomspace(4e6, 2e4, n - 1)
        weights = np.geomspace(1e5, 2e8, n)
    if kind == "random":
        work, weights = 2e-3 * rng.lognormal(0, 0.8, n), 1e7 * rng.lognormal(0, 1.2, n)
        crossing = 1e6 * rng.lognormal(0, 0.8, n - 1)

    return given(work, crossing, weights)


def given(
    work: np.ndarray, crossing: np.ndarray, weights: np.ndarray, outputs: float = 4e3
) -> CostsOf:
    """A network of so many seconds and bytes: forward, cuts, outputs of a sample, parameters."""
    n = len(work)

    def costs_of(samples: int) -> PartitionTable:
        return PartitionTable(
            names=tuple(f"layer{k}" for k in range(n)),
            layers=(1,) * n,
            parameters=tuple((weights / 4).astype(int).tolist()),
            forward_s=tuple((samples * work).tolist()),
            backward_s=tuple((2 * samples * work).tolist()),
            cut_bytes=tuple((samples * crossing).tolist()),
            output_bytes=samples * outputs,
            gradient_bytes=tuple(weights.tolist()),
            kept_bytes=tuple((4 * weights).tolist()),
            activation_bytes=tuple((samples * 4 * np.append(crossing, crossing[-1])).tolist()),
            step_s=tuple((weights / 1e11).tolist()),
        )

    return costs_of


NETWORKS: dict[str, Callable[[], CostsOf]] = {
    "3D-ResAttNet-18": resattnet,
    "parameters behind": lambda: drawn("parameters behind"),
    "equal blocks": lambda: drawn("equal blocks"),
    "random": lambda: drawn("random"),
}


def random_cluster(seed: int, costs: PartitionTable) -> ClusterDescription:
    """Unlike devices, some of which may be too small for the whole network."""
    rng = np.random.default_rng(seed)
    count, host = 2 + seed % 7, int(rng.choice([2, 4]))
    kinds = int(rng.integers(2, 5))
    speeds, shares = rng.uniform(0.1, 1.0, kinds), rng.choice([0.6, 0.9, 2.0], kinds)
    speeds[0] = 1.0
    needed = sum(costs.held_bytes(1))
    devices = tuple(
        DeviceSpec(
            name=f"kind {kind}",
            flops_per_s=FLOPS_PER_S * float(speeds[kind]),
            memory_bytes=needed * float(shares[kind]),
        )
        for kind in rng.permutation([0, 1, *rng.integers(kinds, size=count - 2)])
    )
    inside = Level(
        name="host", devices=host, bandwidth_bytes_per_s=float(rng.choice([6e9, 5e10])),
        latency_s=1e-5,
    )  # fmt: skip
    outside = Level(
        name="network", devices=8, latency_s=5e-5,
        bandwidth_bytes_per_s=float(rng.choice([1.25e8, 1.25e9, 3.1e9])),
    )  # fmt: skip
    levels = (outside,) if count <= host else (inside, outside)
    return ClusterDescription(name=f"random {seed}", devices=devices, levels=levels)


def shapes_of(
    size: int, slices: int, partitions: int
) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """Copies, rounds and recomputation of replicas of so many devices."""
    for turns in (1, 2, 3) if size > 1 else (1,):
        if size * turns <= partitions:
            yield (1,) * size, turns, False
    if size > 1 and slices > 1:
        yield (1,) * size, 1, True
    for stages in range(2, min(size, partitions + 1)):
        for cuts in combinations(range(1, size), stages - 1):
            copies = tuple(b - a for a, b in zip((0, *cuts), (*cuts, size)))
            if max(copies) <= slices:
                yield copies, 1, False


def seatings(cluster: ClusterDescription, size: int, replicas: int) -> Iterator[tuple[int, ...]]:
    """All choices of devices and their order, but those that only have other names."""
    seen, numbers = set(), range(len(cluster.devices))
    inner = cluster.levels[0].devices
    for used in permutations(numbers, size * replicas):
        drivers = used[::size]
        if drivers != tuple(sorted(drivers)) or drivers[0] != min(used):
            continue
        places = tuple((cluster.devices[k], k // inner) for k in used)
        if places not in seen:
            seen.add(places)
            yield (*used, *(k for k in numbers if k not in used))


def least_s(space: Arrangements, genes: Arrangement, sums: list[float]) -> float:
    """Seconds for a sample, if nothing but the busiest device of each replica took time."""
    speeds, taken = space.cluster.relative_speeds, 0.0
    owners = [*genes.copies] * genes.turns
    for first in range(0, len(genes.used), genes.size):
        busy = [0.0] * genes.size
        device = 1 if genes.size > 1 else 0
        for stage, count in enumerate(owners):
            a, b = (genes.ends[stage - 1] if stage else 0), genes.ends[stage]
            for _ in range(count):
                # of copies no one can have less than its part of the micro-batches, rounded down
                part = genes.microbatches // count / genes.microbatches
                speed = speeds[genes.used[first + device]]
                busy[device] += part * (sums[b] - sums[a]) / speed
                device = (device + 1) % genes.size
        taken += 1 / max(busy)
    if genes.has_copies:  # which have equal shares
        return 0.0
    return 1 / taken


def of_all(space: Arrangements, best_s: float) -> tuple[float, int]:
    """The least seconds for a sample of all arrangements, and how many there are."""
    cluster, n, tried = space.cluster, space.partitions, 0
    count = len(cluster.devices)
    sums = {m: space.costs_of(BATCH // m).sums for m in space.numbers}
    for replicas in range(1, count + 1):
        for size in range(1, count // replicas + 1):
            for devices in seatings(cluster, size, replicas):
                for slices in space.numbers:
                    work = [
                        f + b for f, b in zip(sums[slices]["forward_s"], sums[slices]["backward_s"])
                    ]
                    work = [slices * w / BATCH for w in work]
                    for copies, turns, again in shapes_of(size, slices, n):
                        stages = len(copies) * turns
                        for cuts in combinations(range(1, n), stages - 1):
                            genes = Arrangement(
                                devices, replicas, copies, turns, slices, again, (*cuts, n)
                            )
                            tried += 1
                            if least_s(space, genes, work) < best_s:
                                best_s = min(best_s, space.cost(genes))
    return best_s, tried


def of_long_search(space: Arrangements, answer: Arrangement, evaluations: int) -> float:
    """The least seconds for a sample that descents and breeding find."""
    rng = np.random.default_rng(1)

    def search(cost: Callable[[Arrangement], float]) -> None:
        while True:
            descend(space, answer, cost, rng, 1000)
            for _ in range(4):
                descend(space, space.random(rng), cost, rng, 300)

    found = run_counted(space, search, evaluations // 2)[1][-1]
    try:
        bred = evolve(space, 1, Breeding(evaluations=evaluations // 2, population=12))[1][-1]
    except AllocationError:
        bred = inf
    return min(found, bred)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clusters", type=int, nargs="*", default=range(30))
    arguments = parser.parse_args()
    networks: dict[str, CostsOf] = {}
    gaps, seconds = {}, []
    for seed in arguments.clusters:
        network = [*NETWORKS][seed // 7 % len(NETWORKS)]
        costs_of = networks[network] = networks.get(network) or NETWORKS[network]()
        cluster = random_cluster(seed, costs_of(BATCH))
        count, start_s = len(cluster.devices), process_time()
        planned = recommended(rank_shapes([costs_of], cluster, BATCH, spare=0.0))
        seconds.append(process_time() - start_s)
        numbers = [m for m in range(1, BATCH + 1) if BATCH % m == 0]
        space = Arrangements(costs_of, cluster, BATCH, numbers)
        answer_s, answer = 1 / planned.samples_per_s, planned.arrangement
        if abs(space.cost(answer) / answer_s - 1) > 1e-6:
            print(f"    the search says {space.cost(answer)}, not {answer_s}")
        start_s = process_time()
        if count <= EXHAUSTIVE:
            best_s, tried = of_all(space, answer_s)
            how = f"all {tried:,}"
        else:
            best_s = min(answer_s, of_long_search(space, answer, LONG // count))
            how = f"{LONG // count:,} evaluations"
        gap = 100 * (answer_s / best_s - 1)
        name = f"{seed}: {count} devices, {network}, beyond the best of {how}"
        gaps[name] = gap
        record({name: gap}, "%")
        print(
            f"{seed:2} {network:17} {count} devices: +{gap:.2f} % of {how}; planned in "
            f"{seconds[-1]:.1f} s ({process_time() - start_s:.0f} s): {planned}",
            flush=True,
        )
    values = sorted(gaps.values())
    small = [gap for name, gap in gaps.items() if "of all" in name]
    print(
        f"{len(values)} clusters: median +{np.median(values):.2f} %, worst +{values[-1]:.2f} %; "
        f"{len(small)} gone through: worst +{max(small, default=0):.2f} %; planned in "
        f"{max(seconds):.1f} CPU s at most"
    )
    record({"median": float(np.median(values)), "worst": values[-1]}, "%")


if __name__ == "__main__":
    main()
