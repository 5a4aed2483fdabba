"""Table 3 of Akintoye et al. 2022 beside simulated speed-ups on their machine, p3.16xlarge.

The published times (`akintoye_2022_table3.csv`) give the speed-ups of Eq. 14. Simulated is the
epoch of 3D-ResAttNet-18 and -34 on volumes of 91x109x91 (their input size is not given; see
docs/adni.md), from counted operations at the vendor's peak and counted bytes: 6 samples a GPU as in
the paper, so that m GPUs take a batch of 6 m.

* DP: parameters are sent out and gradients collected in each step, nothing overlaps.
* DDP: the all-reduce runs beside the backward.
* GPipe: m stages, micro-batches of 6, cut by the dynamic programme.
* DDG: forwards one after the other, backwards at once: sum TF + max TB a batch of 6.
* FDG: all at once: max (TF + TB) a batch of 6.
* hybrid: the fastest of R replicas x S stages with R S = m, with micro-batches of 6.

    python benchmarks/paper_speedups.py
"""

import csv
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lightning_hybrid.asking.partition_costs import capture_call
from lightning_hybrid.graph import network_partitions
from lightning_hybrid.planning.cluster_description import ClusterDescription
from lightning_hybrid.planning.fastest_cuts import best_chain
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem
from lightning_hybrid.planning.step_time import speedup
from lightning_hybrid.profiling.network_table import count
from models import ResAttNet3D

TABLE3 = Path(__file__).with_name("akintoye_2022_table3.csv")
SAMPLES = 6
"""Of a GPU in a step, and of a micro-batch."""
VOLUME = (1, 91, 109, 91)
UPDATE_BYTES = 5
"""Bytes that SGD with momentum reads and writes per byte of parameters."""
MEMORY_BYTES_PER_S = 9e11
"""Of a V100."""


class Network:
    """A network on p3.16xlarge: what its parts take, counted."""

    def __init__(self, depth: int) -> None:
        cluster = ClusterDescription.load("p3.16xlarge")
        self.link, rate = cluster.levels[0], cluster.devices[0].flops_per_s
        with torch.device("meta"):
            network = ResAttNet3D(depth)
            graph, _ = capture_call(network, (torch.empty(SAMPLES, *VOLUME),), {})
        counted = count(graph, network_partitions(graph)).scaled(1.0, 1 / rate)
        self.parameters = counted.parameter_bytes
        self.table = PartitionTable(
            forward_s=counted.forward_s,
            backward_s=counted.backward_s,
            cut_bytes=counted.cut_bytes,
            step_s=[UPDATE_BYTES * size / MEMORY_BYTES_PER_S for size in self.parameters],
        )

    def pipeline(self, replicas: int, stages: int) -> StepProblem:
        ring = 2 * (replicas - 1) / replicas / self.link.bandwidth_bytes_per_s
        return StepProblem(
            table=replace(self.table, reduce_s=[ring * size for size in self.parameters]),
            speeds=[1.0] * stages,
            links=LinkCosts.equal(stages, self.link.bandwidth_bytes_per_s, self.link.latency_s),
            microbatches=stages,
        )

    def step_s(self, replicas: int, stages: int) -> float:
        """Seconds of a step of 6 samples for each of the R S devices."""
        return best_chain(self.pipeline(replicas, stages), [*range(1, stages), 0])[1]

    def delayed_s(self, stages: int, *, locked: bool) -> float:
        """Seconds per batch of 6 samples of DDG (forward locked) or FDG, once it is filled."""
        problem = replace(self.pipeline(1, stages), microbatches=max(2, stages))
        ends, _ = best_chain(problem, [*range(1, stages), 0])
        costs = problem.costs(ends, [*range(1, stages), 0])
        messages = [self.link.latency_s + send for send in costs.send_s]
        sent = [*messages, 0.0]
        steps = costs.step_s
        if locked:
            forward = sum(costs.forward_s) + sum(messages)
            return forward + max(b + s + u for b, s, u in zip(costs.backward_s, sent, steps))
        return max(
            max(f + b + u, s) for f, b, s, u in zip(costs.forward_s, costs.backward_s, sent, steps)
        )

    def samples_per_s(self, gpus: int) -> dict[str, float]:
        work = 6 * gpus
        parameters = sum(self.parameters)
        compute = sum(self.table.forward_s) + sum(self.table.backward_s)
        update = sum(self.table.step_s)
        sent = 2 * (gpus - 1) * parameters / self.link.bandwidth_bytes_per_s
        shapes = [(r, gpus // r) for r in range(1, gpus + 1) if gpus % r == 0]
        steps = {shape: self.step_s(*shape) for shape in shapes}
        return {
            "DP": work / (compute + sent + update),
            "DDP": work / self.ddp_s(gpus),
            "GPipe": work / steps[1, gpus],
            "DDG": 6 / self.delayed_s(gpus, locked=True),
            "FDG": 6 / self.delayed_s(gpus, locked=False),
            "hybrid": work / min(self.ddp_s(gpus), *steps.values()),
        }

    def ddp_s(self, gpus: int) -> float:
        ring = 2 * (gpus - 1) / gpus * sum(self.parameters) / self.link.bandwidth_bytes_per_s
        forward, backward = sum(self.table.forward_s), sum(self.table.backward_s)
        # buckets leave as they are filled; the first bucket to be ready is the last layer's
        return forward + max(backward, ring) + sum(self.table.step_s)


def published() -> dict[tuple[str, str], list[float]]:
    """Speed-ups of Eq. 14 by network and task, for 1 to 8 GPUs."""
    minutes: dict[tuple[str, str], list[float]] = {}
    with TABLE3.open() as file:
        for row in csv.DictReader(file):
            minutes.setdefault((row["network"], row["task"]), []).append(float(row["minutes"]))
    return {key: [speedup(times[0], t) for t in times] for key, times in minutes.items()}


def main() -> None:
    console = Console(width=140)
    paper = published()
    for depth in (18, 34):
        name = f"3D-ResAttNet{depth}"
        network = Network(depth)
        rates = [network.samples_per_s(gpus) for gpus in range(1, 9)]
        one = rates[0]["DDP"]
        table = Table("GPUs", *(f"paper, {task}" for n, task in paper if n == name), *rates[0],
                      title=f"{name}: speed-up, published and simulated")  # fmt: skip
        for gpus, row in enumerate(rates, 1):
            columns = [paper[key][gpus - 1] for key in paper if key[0] == name]
            columns += [rate / one for rate in row.values()]
            table.add_row(str(gpus), *(f"{value:.2f}" for value in columns))
        console.print(table)
        console.print(f"one GPU, simulated: {one:.1f} samples/s at the vendor's peak")


if __name__ == "__main__":
    main()
