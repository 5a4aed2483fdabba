"""Every schedule at work, from the traces of real runs on two processes: a picture and a table.

Trains 3D-ResAttNet-18 under each of them, with one thread each, and draws the last batches:
forwards, backwards, and the weight parts of backwards that are split, with the number of the
micro-batch (of streamed schedules: of the batch). What is empty is waiting, the optimizer step, and
what the training loop does. Black edges are the later stages of a device that has several.

    python benchmarks/schedule_timelines.py [--out docs/schedules.png] [--schedules fdg looped]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _timing import Repeated, asked, bare_trainer
from rich.console import Console
from rich.table import Table
from schedules import Plain

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.stage.trace import VARIABLE
from models import ResAttNet3D

SCHEDULES = ("gpipe", "looped", "zero_bubble", "1f1b_stream", "pipedream", "ddg", "fdg", "akintoye")
DEVICES, MICROBATCHES, WINDOW, BATCHES, DRAWN = 2, 4, 4, 13, 6
COLOURS = {"forward": "#7fb3d5", "backward": "#52be80", "weight": "#f0b27a"}
NAME = re.compile(r"(?:stage (\d+) )?(forward|backward|weight) (\d+)")


@dataclass(frozen=True)
class Work:
    """A forward or a backward; seconds since the epoch."""

    rank: int
    stage: str
    kind: str
    number: int
    start_s: float
    end_s: float


def train(schedule: str) -> None:
    """One run, on both processes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    streamed = schedule in STREAMED
    batched = {} if streamed else {"num_microbatches": MICROBATCHES}
    # a batch of a stream is as large as a micro-batch of the others
    inputs = Repeated((1, 48, 48, 48), 2 if streamed else 2 * MICROBATCHES, BATCHES)
    trainer = bare_trainer(
        strategy=HybridGabraStrategy(
            pipeline_parallel_size=DEVICES, schedule=asked(schedule), **batched
        ),
        devices=DEVICES,
        max_epochs=1,
        accumulate_grad_batches=WINDOW if schedule == "1f1b_stream" else 1,
    )
    trainer.fit(Plain(ResAttNet3D(18)), inputs.loader(workers=1))


def recorded(schedule: str) -> list[Work]:
    """What both ranks did in the last batches of a run."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", VARIABLE: folder}
        command = [sys.executable, __file__, "--run", schedule]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        events = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    found: list[Work] = []
    for rank, trace in enumerate(events):
        seen: dict[tuple[str, str], int] = {}
        for event in sorted(trace["traceEvents"], key=lambda e: float(e.get("ts", 0))):
            match = NAME.fullmatch(event["name"]) if event["ph"] == "X" else None
            if match is None:
                continue
            stage, kind, number = match[1] or "", match[2], int(match[3])
            if schedule in STREAMED:  # whose batches are one micro-batch each, in order
                number = seen[stage, kind] = seen.get((stage, kind), -1) + 1
            start_s = event["ts"] / 1e6
            found.append(Work(rank, stage, kind, number, start_s, start_s + event["dur"] / 1e6))
    return last_of(found, schedule)


def last_of(works: list[Work], schedule: str) -> list[Work]:
    """From the beginning of one of the last batches or steps to the end of the run."""
    if schedule not in STREAMED:
        firsts = sorted(w.start_s for w in works if w.kind == "forward" and w.number == 0)
        stages = len({(w.rank, w.stage) for w in works})
        begin_s = firsts[-2 * stages]  # the last two steps
        return [work for work in works if work.start_s >= begin_s]
    window = WINDOW if schedule == "1f1b_stream" else 1
    count = 1 + max(work.number for work in works)
    drawn = -(-DRAWN // window) * window
    first = (count - drawn) // window * window
    begin_s = min(work.start_s for work in works if work.number == first)
    return [work for work in works if work.start_s >= begin_s]


def draw(found: dict[str, list[Work]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(found), figsize=(11, 1.45 * len(found)), layout="constrained", squeeze=False
    )
    for axis, (schedule, works) in zip(axes[:, 0], found.items()):
        # rank 0 is the driver, which has the last stage
        rows = {rank: row for row, rank in enumerate((*range(1, DEVICES), 0))}
        begin_s = min(work.start_s for work in works)
        end_s = max(work.end_s for work in works)
        for work in works:
            start, length = work.start_s - begin_s, work.end_s - work.start_s
            second_half = work.stage != "" and int(work.stage) >= DEVICES
            axis.broken_barh(
                [(start, length)],
                (rows[work.rank] - 0.42, 0.84),
                color=COLOURS[work.kind],
                edgecolor="black" if second_half else "white",
                linewidth=0.7,
            )
            if length > 0.012 * (end_s - begin_s):
                middle = (start + length / 2, rows[work.rank])
                axis.text(*middle, f"{work.number}", ha="center", va="center", fontsize=7)
        names = [f"device {rank}" for rank in rows]
        axis.set(yticks=range(DEVICES), yticklabels=names, xlim=(0, end_s - begin_s))
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        axis.set_title(schedule, loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("seconds", fontsize=8)
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside upper right", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def table_of(found: dict[str, list[Work]]) -> Table:
    """Where the time of each device goes, in what is drawn."""
    table = Table("schedule", "device", *COLOURS, "empty")
    for schedule, works in found.items():
        whole_s = max(work.end_s for work in works) - min(work.start_s for work in works)
        for rank in (*range(1, DEVICES), 0):
            spent = dict.fromkeys(COLOURS, 0.0)
            for work in works:
                if work.rank == rank:
                    spent[work.kind] += work.end_s - work.start_s
            shares = [*spent.values(), whole_s - sum(spent.values())]
            table.add_row(schedule, f"{rank}", *(f"{share / whole_s:.0%}" for share in shares))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("schedules.png"))
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--run", choices=SCHEDULES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        train(chosen.run)
        return
    found = {schedule: recorded(schedule) for schedule in chosen.schedules}
    draw(found, chosen.out)
    Console().print(table_of(found))
    print(chosen.out)


if __name__ == "__main__":
    main()
