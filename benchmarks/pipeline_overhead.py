"""What a step costs against the same pipeline written by hand with torch.distributed.pipelining.

Claim: at most 1.10 times. Both run 3D-ResAttNet-18 on 64x64x64 volumes, batch 6, 3 micro-batches,
two processes with one thread each, the same cut, SGD with momentum; one as a LightningModule under
``hybrid_gabra``, the other as two `PipelineStage`s under `ScheduleGPipe`. The runs alternate.

    python benchmarks/pipeline_overhead.py [--rounds 5] [--steps 8]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _capturing import capture
from _results import record
from _timing import Repeated, durations, optimizer_of, train
from torch import Tensor, nn

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.graph import Stage, cut, find_boundary, make_stages, network_partitions
from models import ResAttNet3D

BATCH, MICROBATCHES, SIDE = 6, 3, 64
WARM_UP = 3


def report(steps: list[float], out: str) -> None:
    Path(out).write_text(json.dumps(steps))


def volumes(steps: int) -> Repeated:
    return Repeated((1, SIDE, SIDE, SIDE), BATCH, steps + WARM_UP)


def run_hybrid(steps: int, point: str, out: str) -> None:
    torch.manual_seed(0)
    strategy = HybridGabraStrategy(
        pipeline_parallel_size=2, num_microbatches=MICROBATCHES, plan=[f"net.{point}"]
    )
    seconds = train(ResAttNet3D(18), strategy, volumes(steps), WARM_UP)
    if seconds is not None:
        report(seconds, out)


class OneStage(nn.Module):
    """A stage in the form that PipelineStage wants: tensors in, one tensor out."""

    def __init__(self, stage: Stage, numbers: tuple[Any, ...]) -> None:
        super().__init__()
        self.stage, self.numbers = stage, numbers

    def forward(self, *values: Tensor) -> Any:
        outputs = self.stage(list(values), self.numbers)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def run_torch(steps: int, point: str, out: str, rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{out}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(60))
    network = ResAttNet3D(18)
    part = torch.zeros(BATCH // MICROBATCHES, 1, SIDE, SIDE, SIDE)
    graph, leaves = capture(network, part)
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    partitions = network_partitions(graph)
    codes = cut(graph, partitions, [find_boundary(partitions, point)])
    stages = make_stages(codes, network, torch.device("cpu"))
    with torch.no_grad():  # shapes are given, so that nothing is run to learn them
        crossing = [value.requires_grad_() for value in stages[0]([part], numbers)]
        last = [value.requires_grad_() for value in stages[1](crossing, numbers)]
    mine = OneStage(stages[rank], numbers)
    examples = (part,) if rank == 0 else tuple(crossing)
    results = tuple(crossing) if rank == 0 else last[0]
    stage = PipelineStage(
        mine, rank, 2, torch.device("cpu"), input_args=examples, output_args=results
    )
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = optimizer_of(stages[rank].parameters())
    starts = []
    for x, y in volumes(steps).loader():
        starts.append(time.perf_counter())
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses: list[Tensor] = []
            schedule.step(target=y, losses=losses)
        optimizer.step()
    if rank == 1:
        report(durations(starts, WARM_UP), out)
    dist.destroy_process_group()


def median_step(kind: str, steps: int, point: str) -> float:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/steps.json"
        ranks = [0] if kind == "hybrid" else [0, 1]
        command = [sys.executable, __file__, "--run", kind, "--steps", str(steps)]
        command += ["--cut", point, "--out", out, "--rank"]
        output = subprocess.DEVNULL
        processes = [
            subprocess.Popen([*command, str(r)], env=environment, stdout=output, stderr=output)
            for r in ranks
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"a {kind} run ended with code {codes}")
        return statistics.median(json.loads(Path(out).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cut", default="layer1.1")
    parser.add_argument("--run", choices=["hybrid", "torch"])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    steps, point = arguments.steps, arguments.cut
    if arguments.run == "hybrid":
        run_hybrid(steps, point, arguments.out)
    elif arguments.run == "torch":
        run_torch(steps, point, arguments.out, arguments.rank)
    else:
        rows: dict[str, list[float]] = {"hybrid": [], "torch": []}
        for number in range(arguments.rounds):
            for kind, times in rows.items():
                times.append(median_step(kind, steps, point))
            print(f"round {number}: " + ", ".join(f"{k} {v[-1]:.3f} s" for k, v in rows.items()))
        hybrid, torch_s = (statistics.median(times) for times in rows.values())
        record({"hybrid_gabra": hybrid, "by hand": torch_s}, "s")
        print(f"median step: hybrid_gabra {hybrid:.3f} s, torch.distributed.pipelining", end=" ")
        print(f"{torch_s:.3f} s, ratio {hybrid / torch_s:.3f} (claim: at most 1.10)")


if __name__ == "__main__":
    main()
