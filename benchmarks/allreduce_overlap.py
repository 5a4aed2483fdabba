"""The all-reduce between the replicas of a stage runs while the last micro-batch goes backward.

Trains 3D-ResAttNet-18 as 2 replicas x 2 stages with a recorded trace, in which it notes the
all-reduces of the drivers, and prints for each driver and the last step when the last backward
began and ended, when each bucket left and arrived, and the share of the all-reduce time that lies
inside of that backward. The trace itself stays in ``--out`` (open it in Perfetto), with a picture
of that step.

    python benchmarks/allreduce_overlap.py [--out overlap]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.stage import gradient_averaging
from lightning_hybrid.stage.trace import VARIABLE
from models import ResAttNet3D

Span = dict[str, Any]
MICRO_BATCHES = 3


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = ResAttNet3D(18)
        self.rank = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rank = self.trainer.strategy.coordinates.rank
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def note_reduces(start: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    """What begins collectives, and notes when an all-reduce has begun, and when it is over."""

    def noting(call: Any, *arguments: Any, peer: str) -> Any:
        begun = time.time()
        work = start(call, *arguments, peer=peer)
        if call.__name__ == "allreduce":
            span = {"name": f"all-reduce of {arguments[0][0].nbytes} bytes", "ph": "X"}
            spans.append(span | {"tid": "all-reduce", "ts": begun * 1e6, "dur": 0.0})

            def over(_: Any, span: Span = spans[-1]) -> None:
                span["dur"] = time.time() * 1e6 - span["ts"]

            work.get_future().then(over)
        return work

    return noting


def train(folder: Path, side: int) -> None:
    """Workers run none of this, so that what is noted here are the all-reduces of the drivers."""
    spans = list[Span]()
    gradient_averaging.start = note_reduces(gradient_averaging.start, spans)
    torch.manual_seed(0)
    batch = 2 * MICRO_BATCHES
    volumes = TensorDataset(torch.randn(6 * batch, 1, *3 * [side]), torch.arange(6 * batch) % 2)
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            data_parallel_size=2,
            pipeline_parallel_size=2,
            num_microbatches=MICRO_BATCHES,
            plan=["net.layer3"],
        ),
        accelerator="cpu",
        devices=4,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(volumes, batch_size=batch))
    path = folder / f"rank{module.rank}.json"
    trace = json.loads(path.read_text())
    trace["traceEvents"] += [{**span, "pid": module.rank} for span in spans]
    path.write_text(json.dumps(trace))


def run(folder: Path, side: int) -> dict[int, list[Span]]:
    """Train in processes of their own. Returns by rank what the trace of each rank has noted."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", VARIABLE: str(folder)}
    command = [sys.executable, __file__, "--run", "--out", str(folder), "--side", f"{side}"]
    subprocess.run(command, env=environment, check=True)
    paths = {int(path.stem.removeprefix("rank")): path for path in folder.glob("rank*.json")}
    return {rank: json.loads(paths[rank].read_text())["traceEvents"] for rank in sorted(paths)}


def last_step(events: list[Span]) -> tuple[list[Span], list[Span]]:
    """The backwards of a driver's last step, in their order, and the all-reduces of that step."""
    backwards = [e for e in events if e["name"].startswith("backward")][-MICRO_BATCHES:]
    begun = backwards[0]["ts"]
    return backwards, [e for e in events if e.get("tid") == "all-reduce" and e["ts"] > begun]


def overlap_share(backward: Span, reduces: list[Span]) -> float:
    """Share of the time of the all-reduces that lies inside of the backward."""
    end = backward["ts"] + backward["dur"]
    inside = sum(max(0.0, min(end, r["ts"] + r["dur"]) - r["ts"]) for r in reduces)
    return inside / sum(r["dur"] for r in reduces)


def draw(ranks: list[list[Span]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    colours = {"forward": "tab:blue", "backward": "tab:green", "all-reduce": "tab:orange"}
    start = min(
        [e["ts"] for e in events if e["name"].startswith("forward")][-MICRO_BATCHES]
        for events in ranks
    )
    for rank, events in enumerate(ranks):
        for event in events:
            if event["ph"] == "X" and event["ts"] >= start:
                kind = event["name"].split()[0]
                row = 2 * rank + (kind == "all-reduce")
                bar = ((event["ts"] - start) / 1e3, event["dur"] / 1e3)
                axes.broken_barh([bar], (row - 0.4, 0.8), color=colours[kind], edgecolor="white")
    names = [f"rank {r}: {row}" for r in range(len(ranks)) for row in ("compute", "all-reduce")]
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="time (ms)")
    axes.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("overlap"))
    parser.add_argument("--side", type=int, default=48, help="of a volume, in voxels")
    parser.add_argument("--run", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.out.absolute()
    if arguments.run:
        train(folder, arguments.side)
        return
    from _results import record  # (tests import this file from another folder)

    ranks = run(folder, arguments.side)
    for rank in (0, 2):  # the drivers
        events = ranks[rank]
        (*_, backward), reduces = last_step(events)
        name, length = events[0]["args"]["name"], backward["dur"] / 1e3
        print(f"{name}: last backward, {backward['name']}, {length:.1f} ms")
        for reduce in reduces:
            begin = (reduce["ts"] - backward["ts"]) / 1e3
            print(
                f"  {reduce['name']}: from {begin:.1f} ms to {begin + reduce['dur'] / 1e3:.1f} ms"
            )
        share = overlap_share(backward, reduces)
        record({f"{name}: share inside of the last backward": 100 * share}, "%")
        print(f"  inside of the backward: {share:.0%} of its time")
    draw([*ranks.values()], folder / "overlap.png")
    print(f"{folder / 'overlap.png'}")


if __name__ == "__main__":
    main()
