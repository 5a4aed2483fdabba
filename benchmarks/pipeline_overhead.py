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
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.network import cut, find_boundary, network_partitions, trace
from models import ResAttNet3D

BATCH, MICROBATCHES, SIDE = 6, 3, 64
WARM_UP = 3


class Volumes(Dataset[tuple[Tensor, int]]):
    """The same few volumes over and over: reading is not what is measured."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.volumes = torch.randn(BATCH, 1, SIDE, SIDE, SIDE, generator=generator)
        self.steps = steps

    def __len__(self) -> int:
        return self.steps * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.volumes[index % BATCH], index % 2


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = ResAttNet3D(18)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.parameters())


class Clock(Callback):
    """Time from the start of one step to the start of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())


def report(starts: list[float], out: str) -> None:
    steps = [b - a for a, b in zip(starts[WARM_UP:], starts[WARM_UP + 1 :])]
    Path(out).write_text(json.dumps(steps))


def run_hybrid(steps: int, point: str, out: str) -> None:
    torch.manual_seed(0)
    clock = Clock()
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            pipeline_parallel_size=2, num_microbatches=MICROBATCHES, allocation=[f"net.{point}"]
        ),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(Module(), DataLoader(Volumes(steps + WARM_UP), batch_size=BATCH))
    if trainer.is_global_zero:
        report(clock.starts, out)


class OneStage(nn.Module):
    """A stage in the form that PipelineStage wants: tensors in, one tensor out."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *values: Tensor) -> Any:
        outputs = self.stage(list(values))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def run_torch(steps: int, point: str, out: str, rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{out}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(60))
    network = ResAttNet3D(18)
    part = torch.zeros(BATCH // MICROBATCHES, 1, SIDE, SIDE, SIDE)
    graph = trace(network, (part,))
    partitions = network_partitions(graph)
    stages = cut(graph, partitions, [find_boundary(partitions, point)])
    with torch.no_grad():  # shapes are given, so that nothing is run to learn them
        crossing = [value.requires_grad_() for value in stages[0]([part])]
        last = [value.requires_grad_() for value in stages[1](crossing)]
    mine = OneStage(stages[rank])
    examples = (part,) if rank == 0 else tuple(crossing)
    results = tuple(crossing) if rank == 0 else last[0]
    stage = PipelineStage(
        mine, rank, 2, torch.device("cpu"), input_args=examples, output_args=results
    )
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = optimizer_of(stages[rank].parameters())
    starts = []
    for x, y in DataLoader(Volumes(steps + WARM_UP), batch_size=BATCH):
        starts.append(time.perf_counter())
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses: list[Tensor] = []
            schedule.step(target=y, losses=losses)
        optimizer.step()
    if rank == 1:
        report(starts, out)
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
        print(f"median step: hybrid_gabra {hybrid:.3f} s, torch.distributed.pipelining", end=" ")
        print(f"{torch_s:.3f} s, ratio {hybrid / torch_s:.3f} (claim: at most 1.10)")


if __name__ == "__main__":
    main()
