"""Where a network is cut: the planner against three splits that people use today.

An even split by layer count, an even split by parameters, and a block partition of measured times
as torchgpipe's `balance_by_time` does it (runs of times with the least maximum). The profiles are
measured here: 3D-ResAttNet-18 and -34, DenseNet121 in 3-D, a transformer of 24 blocks, each on a
micro-batch of 2. Predicted is the step of 2, 4 and 8 stages, 3 micro-batches, by the simulator
that runs the schedule's own lists; measured that of two processes, placements alternating.

    python benchmarks/placements.py [--measure resattnet18 transformer] [--rounds 3]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from _block_partition import block_partition
from _capturing import capture
from _results import record
from _timing import Repeated, train
from monai.networks.nets import DenseNet121
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_hybrid import HybridGabraStrategy, Plan
from lightning_hybrid.allocation import merge
from lightning_hybrid.graph import network_partitions
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.planner import BANDWIDTH_BYTES_PER_S
from lightning_hybrid.planning.search import PlanSettings, Replica, plan_stages
from lightning_hybrid.profiling.measure import measure
from models import ResAttNet3D

MICROBATCHES = 3
SIZE = 2  # of a micro-batch
WIDTH, LENGTH = 256, 128
WARM_UP = 3


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(24)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(dim=1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resattnet18": (lambda: ResAttNet3D(18), (1, 64, 64, 64)),
    "resattnet34": (lambda: ResAttNet3D(34), (1, 64, 64, 64)),
    "densenet121": (lambda: DenseNet121(3, 1, 2), (1, 64, 64, 64)),
    "transformer": (Transformer, (LENGTH, WIDTH)),
}


@dataclass(frozen=True)
class Chain:
    """What is known of a network's partitions, in order."""

    names: list[str]
    layers: list[int]
    parameters: list[int]
    forward_s: list[float]
    backward_s: list[float]
    cut_bytes: list[int]

    @property
    def seconds(self) -> list[float]:
        return [f + b for f, b in zip(self.forward_s, self.backward_s)]

    @property
    def cut_costs(self) -> list[float]:
        return [2 * size / BANDWIDTH_BYTES_PER_S["gloo"] for size in self.cut_bytes]


def profile(name: str) -> Chain:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    network, x = build(), torch.randn(SIZE, *shape)
    graph, leaves = capture(network, x)
    table = measure(graph, network_partitions(graph), leaves)
    return Chain(
        table.names,
        table.layers,
        table.parameters,
        table.forward_s,
        table.backward_s,
        table.cut_bytes,
    )


def even(weights: Sequence[float], count: int) -> list[int]:
    """Ends of `count` runs, cut where the sum is nearest to a fair share."""
    sums = list(accumulate(weights, initial=0))
    ends = [0]
    for run in range(1, count):
        fair = run * sums[-1] / count
        after = bisect_left(sums, fair)
        end = after if sums[after] - fair < fair - sums[after - 1] else after - 1
        ends.append(min(max(end, ends[-1] + 1), len(weights) - count + run))
    return [*ends[1:], len(weights)]


def splits(chain: Chain, stages: int) -> dict[str, list[int] | None]:
    """Ends of the stages; None: the planner chooses, by the step."""
    return {
        "planner": None,
        "layer count": even(chain.layers, stages),
        "parameters": even(chain.parameters, stages),
        "torchgpipe": block_partition(chain.seconds, stages),
        "merging": merge(chain.seconds, chain.cut_costs, stages),
    }


def plan(
    chain: Chain, stages: int, ends: list[int] | None = None, *, contiguous: bool = True
) -> Plan:
    table = PartitionTable(
        names=chain.names,
        forward_s=chain.forward_s,
        backward_s=chain.backward_s,
        cut_bytes=chain.cut_bytes,
        parameters=chain.parameters,
        layers=chain.layers,
    )
    return plan_stages(
        table,
        PlanSettings(contiguous=contiguous),
        Replica(
            stages=stages,
            microbatches=MICROBATCHES,
            bandwidth_bytes_per_s=BANDWIDTH_BYTES_PER_S["gloo"],
        ),
        cut_points=None if ends is None else [chain.names[end] for end in ends[:-1]],
    )


def predictions(chains: dict[str, Chain]) -> Table:
    table = Table("network", "stages", "planner, s", title="Predicted step, and how it compares")
    for title in ("layer count", "parameters", "torchgpipe", "merging"):
        table.add_column(title, justify="right")
    for name, chain in chains.items():
        for stages in (2, 4, 8):
            steps = {
                title: plan(chain, stages, ends).predicted_step_s
                for title, ends in splits(chain, stages).items()
            }
            ours, *others = steps.values()
            table.add_row(name, str(stages), f"{ours:.3f}", *(f"{o / ours:.3f} x" for o in others))
    return table


def run(name: str, point: str, steps: int, out: str) -> None:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    strategy = HybridGabraStrategy(
        pipeline_parallel_size=2, num_microbatches=MICROBATCHES, plan=[f"net.{point}"]
    )
    seconds = train(build(), strategy, Repeated(shape, SIZE * MICROBATCHES, steps + 4), WARM_UP)
    if seconds is not None:
        Path(out).write_text(json.dumps(seconds))


def median_step(name: str, point: str, steps: int) -> float:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/steps.json"
        command = [sys.executable, __file__, "--run", name, "--steps", str(steps)]
        done = subprocess.run(
            [*command, "--cut", point, "--out", out],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{name} cut at {point} ended with {done.returncode}:\n{done.stderr}")
        return statistics.median(json.loads(Path(out).read_text()))


def measurements(name: str, chain: Chain, rounds: int, steps: int) -> Table:
    """Steps of two processes; placements that cut at the same place are run once."""
    plans = {title: plan(chain, 2, ends) for title, ends in splits(chain, 2).items()}
    del plans["merging"]  # ours, and used by nobody yet
    times: dict[str, list[float]] = {p.cuts[0]: [] for p in plans.values()}
    for _ in range(rounds):
        for point, row in times.items():
            row.append(median_step(name, point, steps))
    medians = {point: statistics.median(row) for point, row in times.items()}
    record({f"{name}: {title}": medians[p.cuts[0]] for title, p in plans.items()}, "s")
    ours = plans["planner"]
    table = Table("placement", "cut before", "predicted, s", "measured, s", "against it",
                  title=f"{name} in two processes, {rounds} rounds of {steps} steps")  # fmt: skip
    for title, p in plans.items():
        point, seconds = p.cuts[0], medians[p.cuts[0]]
        ratio = f"{seconds / medians[ours.cuts[0]]:.3f} x"
        table.add_row(title, point, f"{p.predicted_step_s:.3f}", f"{seconds:.3f}", ratio)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--measure", nargs="*", default=["resattnet18"], choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--run", choices=list(NETWORKS))
    parser.add_argument("--cut", default="")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run, arguments.cut, arguments.steps, arguments.out)
        return
    torch.set_num_threads(1)
    console = Console()
    chains = {name: profile(name) for name in arguments.networks}
    console.print(predictions(chains))
    for name in arguments.measure:
        chain = chains.get(name) or profile(name)
        table = measurements(name, chain, arguments.rounds, arguments.steps)
        console.print(table)


if __name__ == "__main__":
    main()
