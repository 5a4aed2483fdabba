"""Two processes of one thread each: what a user would pick, beside what this package does.

Peers, one process group after the other, all of them again in each round, so that other work on the
machine hits all alike:

* ``one thread``, ``all threads``: one process under Lightning's Trainer.
* ``ddp``: two processes, each with half of the batch.
* ``pipelining, M``: two stages made by hand with `torch.distributed.pipelining`, `ScheduleGPipe`,
  with 2, 3 and 4 micro-batches, cut where ``hybrid 1x2, M`` is (its plan is asked for beforehand),
  each stage with its own optimizer; no Trainer. It takes micro-batches of equal size only.
* ``hybrid RxS, M``: fixed shapes: two stages with 1 to 4 micro-batches, and two replicas.
* ``automatic``: `HybridGabraStrategy()` as it is, sizes `"auto"`; the loader shares the batch out
  over the replicas that there are.

All train on the same number of samples a step, with SGD and momentum: each of R replicas takes one
R-th of them. Shown are medians over all steps of all rounds, with the 10th and the 90th percentile,
after a warm-up in each run.

    python benchmarks/against_ddp.py [--networks mlp,tiny] [--peers "ddp;automatic"] [--rounds 3]

Encoders of eight layers, like BERT with a padding mask and like Llama, in four micro-batches:

    python benchmarks/against_ddp.py --networks bert,llama \\
        --peers "one thread;ddp;hybrid 1x2, 1;hybrid 1x2, 4;pipelining, 4" --rounds 5

The latter with dropout, drawn by each micro-batch:

    python benchmarks/against_ddp.py --networks dropout --peers "one thread;hybrid 1x2, 4"
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _results import record
from _timing import Clock, Divided, Repeated, bare_trainer, durations, optimizer_of
from monai.networks.nets import DenseNet121, UNet
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.asking.partition_costs import capture_call
from lightning_hybrid.graph import cut, find_boundary, make_stages, network_partitions
from models import ResAttNet3D

WARM_UP = 3


class Encoder(nn.Module):
    """A transformer encoder over vectors, with one number for each class at the end."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class LikeBert(nn.Module):
    """Eight encoder layers, normalised last; vectors of zeros are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, 0.0, "gelu", batch_first=True)
            for _ in range(8)
        )
        self.head = nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = x.abs().sum(-1) == 0
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.head(torch.tanh(x[:, 0]))


class LlamaLayer(nn.Module):
    """Root-mean-square norms, rotated keys and queries, causal attention, gated perceptron."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.norms = nn.ModuleList(nn.RMSNorm(256) for _ in range(2))
        self.qkv, self.out = nn.Linear(256, 768, bias=False), nn.Linear(256, 256, bias=False)
        self.gate, self.up = (nn.Linear(256, 688, bias=False) for _ in range(2))
        self.down = nn.Linear(688, 256, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        q, k = (h * cos + torch.cat((-h[..., 32:], h[..., :32]), -1) * sin for h in heads[:2])
        mixed = nn.functional.scaled_dot_product_attention(q, k, heads[2], is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        y = self.norms[1](x)
        return x + self.down(self.drop(nn.functional.silu(self.gate(y)) * self.up(y)))


class LikeLlama(nn.Module):
    """Eight of these layers; the last token is classified."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(dropout) for _ in range(8))
        self.norm, self.head = nn.RMSNorm(256), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        frequencies = 10000 ** (-torch.arange(32, device=x.device) / 32)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * frequencies
        angles = torch.cat((angles, angles), -1)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.head(self.norm(x)[:, -1])


class Mean(nn.Module):
    """A picture per class becomes a number per class."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2)


def perceptron(width: int, layers: int) -> nn.Module:
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(width, 2))


def unet() -> nn.Module:
    return nn.Sequential(UNet(3, 1, 2, (16, 32, 64, 128), (2, 2, 2), num_res_units=2), Mean())


@dataclass(frozen=True)
class Case:
    """A network and its batch.

    Attributes:
        make: builds it; its output is (B, 2).
        shape: of a sample.
        batch: samples of a step, on all devices together; even.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int


VOLUME = (1, 64, 64, 64)
CASES = {
    "resattnet18": Case(lambda: ResAttNet3D(18), VOLUME, 6),
    "resattnet34": Case(lambda: ResAttNet3D(34), VOLUME, 6),
    "densenet121": Case(lambda: DenseNet121(3, 1, 2), VOLUME, 4),
    "unet": Case(unet, VOLUME, 6),
    "mlp": Case(lambda: perceptron(1024, 20), (1024,), 32),
    "transformer": Case(Encoder, (128, 256), 12),
    "bert": Case(LikeBert, (128, 256), 8),
    "llama": Case(LikeLlama, (128, 256), 8),
    "dropout": Case(lambda: LikeLlama(0.1), (128, 256), 8),
    "tiny": Case(lambda: perceptron(32, 40), (32,), 32),
}


def fixed(
    replicas: int, stages: int, microbatches: int, **more: Any
) -> Callable[[], HybridGabraStrategy]:
    return lambda: HybridGabraStrategy(
        data_parallel_size=replicas,
        pipeline_parallel_size=stages,
        num_microbatches=microbatches,
        **more,
    )


STRATEGIES: dict[str, Callable[[], Any]] = {
    "one thread": lambda: "auto",
    "all threads": lambda: "auto",
    "ddp": lambda: "ddp",
    "hybrid 1x2, 1": fixed(1, 2, 1),
    "hybrid 1x2, 2": fixed(1, 2, 2),
    "hybrid 1x2, 3": fixed(1, 2, 3),
    "hybrid 1x2, 4": fixed(1, 2, 4),
    "hybrid 2x1, 1": fixed(2, 1, 1),
    "automatic": HybridGabraStrategy,
}
PIPELINING = {"pipelining, 2": 2, "pipelining, 3": 3, "pipelining, 4": 4}
PEERS = (*STRATEGIES, *PIPELINING)


def run_trainer(case: Case, peer: str, steps: int, out: Path) -> None:
    torch.manual_seed(0)
    threads = peer == "all threads"
    torch.set_num_threads(len(os.sched_getaffinity(0)) if threads else 1)
    strategy = STRATEGIES[peer]()
    clock = Clock()
    trainer = bare_trainer(
        strategy=strategy,
        devices=1 if peer in ("one thread", "all threads") else 2,
        max_steps=steps + WARM_UP,
        callbacks=[clock],
    )
    trainer.fit(Divided(case.make(), case.shape, case.batch, steps + WARM_UP + 1))
    if trainer.is_global_zero:
        found: dict[str, Any] = {"steps": durations(clock.starts, WARM_UP), "note": ""}
        if isinstance(strategy, HybridGabraStrategy):
            plan, made = strategy.plan, strategy.num_replicas
            if peer == "automatic":  # a network that is not cut has no plan
                found["note"] = (
                    f"{made}x{plan.stages}, {plan.microbatches}" if plan else f"{made}x1"
                )
            found["cuts"] = plan.cuts if plan else ()
        out.write_text(json.dumps(found))


def run_pipelining(
    case: Case, microbatches: int, cut_point: str, steps: int, out: Path, rank: int
) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{out}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(60))
    network = case.make()
    part = torch.zeros(case.batch // microbatches, *case.shape)
    graph, leaves = capture_call(network, (part,), {})
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    partitions = network_partitions(graph)
    boundary = find_boundary(partitions, cut_point)
    stages = make_stages(cut(graph, partitions, [boundary]), network, torch.device("cpu"))

    class OneStage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = stages[rank]

        def forward(self, *values: Tensor) -> Any:
            outputs = self.stage(list(values), numbers)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

    with torch.no_grad():  # shapes are given, so that nothing is run to learn them
        crossing = stages[0]([part], numbers)
        for value in crossing:  # (a mask crosses too)
            value.requires_grad_(value.is_floating_point())
        last = [value.requires_grad_() for value in stages[1](crossing, numbers)]
    stage = PipelineStage(
        OneStage(),
        rank,
        2,
        torch.device("cpu"),
        input_args=(part,) if rank == 0 else tuple(crossing),
        output_args=tuple(crossing) if rank == 0 else last[0],
    )
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=nn.functional.cross_entropy)
    optimizer = optimizer_of(stages[rank].parameters())
    starts = []
    for x, y in Repeated(case.shape, case.batch, steps + WARM_UP + 1).loader():
        starts.append(time.perf_counter())
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
    if rank == 1:
        out.write_text(json.dumps({"steps": durations(starts, WARM_UP), "note": ""}))
    dist.destroy_process_group()


def cut_point(name: str, microbatches: int) -> str:
    """Where this package begins the second of two stages; what it measures for that is cached."""
    cuts = measured(name, f"hybrid 1x2, {microbatches}", 1).get("cuts")
    return cuts[0] if cuts else ""


def measured(name: str, peer: str, steps: int, begins: str = "") -> dict[str, Any]:
    """The steps of one run.

    Args:
        name: of the network.
        peer: what trains it.
        steps: after the warm-up.
        begins: where the second stage of a pipeline made by hand begins.
    """
    environment = dict(os.environ)
    if peer != "all threads":
        environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.json"
        command = [sys.executable, __file__, "--run", peer, "--networks", name]
        command += ["--steps", str(steps), "--out", str(out), "--cut", begins, "--rank"]
        log = (Path(folder) / "log").open("w+")
        processes = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=log, stderr=log)
            for rank in ([0, 1] if peer in PIPELINING else [0])
        ]
        codes = [process.wait() for process in processes]
        if any(codes) or not out.is_file():
            log.seek(0)
            print(f"{name}, {peer}: ended with {codes}: {log.read()[-1500:]}", file=sys.stderr)
            return {"steps": [], "note": "failed"}
        return dict(json.loads(out.read_text()))


def compare(name: str, peers: list[str], rounds: int, steps: int) -> None:
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    notes: dict[str, str] = {}
    cuts: dict[str, str] = {}
    for peer in set(peers) & set(PIPELINING):
        if CASES[name].batch % PIPELINING[peer]:
            notes[peer] = f"{CASES[name].batch} samples are no {PIPELINING[peer]} equal parts"
        else:
            cuts[peer] = cut_point(name, PIPELINING[peer])
    running = [peer for peer in peers if peer in STRATEGIES or cuts.get(peer)]
    for _ in range(rounds):
        for peer in running:
            found = measured(name, peer, steps, cuts.get(peer, ""))
            times[peer] += found["steps"]
            notes[peer] = found["note"]
    known = {peer: statistics.median(v) for peer, v in times.items() if v}
    record({f"{name}: {peer}": 1e3 * step_s for peer, step_s in known.items()}, "ms")
    best = min(known, key=known.__getitem__, default=None)
    table = Table("peer", "median, ms", "10 % to 90 %, ms", "of ddp", "", title=name)
    for peer in peers:
        if peer not in known:
            table.add_row(peer, "-", "-", "-", notes.get(peer, "no cut was found"))
            continue
        low, *_, high = statistics.quantiles(times[peer], n=10) if len(times[peer]) > 1 else [0, 0]
        of_ddp = f"{known[peer] / known['ddp']:.2f}" if "ddp" in known else "-"
        mark = f"{notes[peer]}{' (best)' if peer == best else ''}"
        spread = f"{low * 1e3:.2f} to {high * 1e3:.2f}"
        table.add_row(peer, f"{known[peer] * 1e3:.2f}", spread, of_ddp, mark.strip())
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(CASES), help="separated by commas")
    parser.add_argument("--peers", default=";".join(PEERS), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--run", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--cut", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    names, peers = chosen.networks.split(","), chosen.peers.split(";")
    for kind, given, known in (("network", names, CASES), ("peer", peers, PEERS)):
        for one in given:
            if one not in known:
                parser.error(f"there is no {kind} {one!r}; known: {', '.join(known)}")
    if chosen.run in PIPELINING:
        case, microbatches = CASES[names[0]], PIPELINING[chosen.run]
        run_pipelining(case, microbatches, chosen.cut, chosen.steps, chosen.out, chosen.rank)
    elif chosen.run:
        run_trainer(CASES[names[0]], chosen.run, chosen.steps, chosen.out)
    else:
        for name in names:
            compare(name, peers, chosen.rounds, chosen.steps)


if __name__ == "__main__":
    main()
