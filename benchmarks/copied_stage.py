"""Three copies of a stage between slow hosts, beside replicas, chains and both: four processes.

Claim: where the front of a network has three quarters of the work and its back 100 million
parameters, a group of three copies of the front and one back (3-1) is faster than two replicas of
two stages, four stages, and `ddp`; and the plan for such a cluster has copies. The hosts are four
network namespaces (Linux, as root) on one switch whose cables let 500 Mbit/s through each way; each
runs one process that may use 0.4 of a processor. All train on as many samples a step, and each
shape by the plan that is predicted to be its fastest. Peers alternate; medians of all steps.

    python benchmarks/copied_stage.py [--rounds 2] [--steps 4]
"""

import argparse
import json
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _hosts import hosts, missing_tool, run_on
from _quota import quota
from _results import record
from _timing import Clock, Divided, bare_trainer, durations, optimizer_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.asking.partition_costs import capture_call, measured_parts
from lightning_hybrid.graph import network_partitions
from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.shapes import plans_of, rank_shapes
from lightning_hybrid.profiling import optimizer_bytes

HOSTS, MBIT, SHARE = 4, 500, 0.4
TOKENS, WIDTH, HIDDEN, HEAD = 240, 256, 8192, 4096
BATCH, WARM_UP = 96, 2
GROUP = "lightning_hybrid_host"
LATENCY_S = 2e-4
"""Of a message between two such hosts."""
SHAPES = {"ddp": (4, (1,)), "2x2": (2, (1, 1)), "1x4": (1, (1, 1, 1, 1)), "3-1": (1, (3, 1))}
"""Replicas, and the copies of each stage."""


class FrontAndBack(nn.Module):
    """A wide layer on each token, and a head of 102 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH), nn.ReLU()
        )
        self.back = nn.Sequential(
            nn.Linear(WIDTH, HEAD),
            nn.ReLU(),
            nn.Linear(HEAD, 3 * HEAD),
            nn.ReLU(),
            nn.Linear(3 * HEAD, HEAD),
            nn.ReLU(),
            nn.Linear(HEAD, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.front(x).mean(1))


def plans(out: Path) -> None:
    """Of each shape the plan that is predicted to be its fastest, and of all shapes."""
    level = Level(
        name="switch", devices=HOSTS, bandwidth_bytes_per_s=MBIT * 1e6 / 8, latency_s=LATENCY_S
    )
    device = DeviceSpec(name="part of a CPU", flops_per_s=1.0)
    cluster = ClusterDescription(name="hosts", devices=(device,) * HOSTS, levels=(level,))
    network = FrontAndBack().train()
    graph, leaves = capture_call(network, (torch.randn(BATCH, TOKENS, WIDTH),), {})
    partitions = network_partitions(graph)
    state = optimizer_bytes(network, [optimizer_of(network.parameters())])
    costs_of = measured_parts(graph, partitions, leaves, torch.device("cpu"), state)
    found: dict[str, Any] = {}
    fastest: tuple[float, str] = (float("inf"), "")
    for replicas in (1, 2, 4):
        shapes = rank_shapes([costs_of], cluster, BATCH // replicas)
        mine = [shape for shape in shapes if shape.arrangement.replicas == replicas]
        fastest = min(fastest, (mine[0].step_s, str(mine[0])))
        for name, (number, copies) in SHAPES.items():
            if number == replicas:
                made = ((shape, shape.arrangement) for shape in mine)
                best = next(shape for shape, it in made if (it.copies, it.turns) == (copies, 1))
                plan = plans_of(best, costs_of, cluster, BATCH // replicas)[0]
                found[name] = {"predicted": best.step_s, "shape": str(best), "plan": plan.to_json()}
    out.write_text(json.dumps({"peers": found, "fastest": fastest}))


def train(peer: str, plan: Path, rank: int, steps: int, out: Path) -> None:
    """One host's process."""
    socket.sethostname(f"host{rank}")  # it has a namespace of names of its own
    strategy: Any = "ddp" if peer == "ddp" else HybridGabraStrategy(plan=plan)
    torch.manual_seed(0)
    clock, count = Clock(), steps + WARM_UP + 1
    trainer = bare_trainer(strategy, devices=1, num_nodes=HOSTS, max_steps=count, callbacks=[clock])
    trainer.fit(Divided(FrontAndBack(), (TOKENS, WIDTH), BATCH, count))
    if trainer.is_global_zero:
        out.write_text(json.dumps(durations(clock.starts, WARM_UP)))


def compare(rounds: int, steps: int) -> None:
    times: dict[str, list[float]] = {peer: [] for peer in SHAPES}
    with ExitStack() as stack:
        names = stack.enter_context(hosts(HOSTS, MBIT))
        groups = [stack.enter_context(quota(f"{GROUP}{k}", SHARE)) for k in range(HOSTS)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {"OMP_NUM_THREADS": "1", "LIGHTNING_HYBRID_CACHE": str(folder)}

        def run(count: int, *options: str) -> Any:
            text = run_on(names[:count], __file__, options, environment, groups)
            if not text:
                sys.exit(1)
            return json.loads(text)

        planned = run(1, "--run", "plans")
        for peer, found in planned["peers"].items():
            (folder / f"{peer}.json").write_text(found["plan"])
        for peer in _in_turn(rounds):
            plan = str(folder / f"{peer}.json")
            times[peer] += run(HOSTS, "--run", peer, "--steps", str(steps), "--plan", plan)
    medians = {peer: statistics.median(each) for peer, each in times.items()}
    predicted = {f"{peer}, predicted": planned["peers"][peer]["predicted"] for peer in SHAPES}
    record(medians | predicted, "s")
    table = Table("peer", "median, s", "least to longest, s", "predicted, s", "shape")
    for peer, each in times.items():
        spread, found = f"{min(each):.2f} to {max(each):.2f}", planned["peers"][peer]
        said = f"{found['predicted']:.2f}"
        table.add_row(peer, f"{medians[peer]:.2f}", spread, said, found["shape"])
    Console(width=130).print(table)
    print("predicted to be the fastest of all shapes: {1}, {0:.2f} s".format(*planned["fastest"]))


def _in_turn(rounds: int) -> Iterator[str]:
    for _ in range(rounds):
        yield from SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--run", choices=("plans", *SHAPES), help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        torch.set_num_threads(1)
        if chosen.run == "plans":
            plans(chosen.out)
        else:
            train(chosen.run, chosen.plan, chosen.rank, chosen.steps, chosen.out)
        return
    if missing := missing_tool():
        parser.error(missing)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are deleted
    compare(chosen.rounds, chosen.steps)


if __name__ == "__main__":
    main()
