"""The all-reduce between the replicas of a stage runs while the last micro-batch goes backward.

Trains 3D-ResAttNet-18 as 2 replicas x 2 stages with a recorded trace, and prints for each rank and
the last step when the last backward began and ended, when each bucket left and arrived, and the
share of the all-reduce time that lies inside of that backward. The trace itself stays in
``--out`` (open it in Perfetto), with a picture of that step.

    python benchmarks/allreduce_overlap.py [--out overlap]
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.stage.trace import VARIABLE
from models import ResAttNet3D

Span = dict[str, Any]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = ResAttNet3D(18)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train() -> None:
    torch.manual_seed(0)
    volumes = TensorDataset(torch.randn(36, 1, 48, 48, 48), torch.arange(36) % 2)
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            data_parallel_size=2,
            pipeline_parallel_size=2,
            num_microbatches=3,
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
    trainer.fit(Module(), DataLoader(volumes, batch_size=6))


def last_step(events: list[Span]) -> tuple[Span, list[Span]]:
    """The last backward of micro-batch 0, which is the last of its step, and its all-reduces."""
    backward = [e for e in events if e["name"] == "backward 0"][-1]
    reduces = [e for e in events if e.get("tid") == "all-reduce" and e["ts"] > backward["ts"]]
    return backward, reduces


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
    start = min([e["ts"] for e in events if e["name"] == "forward 0"][-1] for events in ranks)
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
    parser.add_argument("--run", action="store_true")
    arguments = parser.parse_args()
    if arguments.run:
        train()
        return
    from _results import record  # (tests import this file from another folder)

    folder = arguments.out.absolute()
    environment = os.environ | {"OMP_NUM_THREADS": "1", VARIABLE: str(folder)}
    subprocess.run([sys.executable, __file__, "--run"], env=environment, check=True)
    paths = sorted(folder.glob("rank*.json"))
    ranks = [json.loads(path.read_text())["traceEvents"] for path in paths]
    for path, events in zip(paths, ranks):
        backward, reduces = last_step(events)
        name, length = events[0]["args"]["name"], backward["dur"] / 1e3
        print(f"{name} ({path.name}): last backward {length:.1f} ms")
        for reduce in reduces:
            begin = (reduce["ts"] - backward["ts"]) / 1e3
            print(
                f"  {reduce['name']}: from {begin:.1f} ms to {begin + reduce['dur'] / 1e3:.1f} ms"
            )
        share = overlap_share(backward, reduces)
        record({f"{name}: share inside of the last backward": 100 * share}, "%")
        print(f"  inside of the backward: {share:.0%} of its time")
    draw(ranks, folder / "overlap.png")
    print(f"{folder / 'overlap.png'}")


if __name__ == "__main__":
    main()
