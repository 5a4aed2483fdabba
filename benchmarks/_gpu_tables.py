"""Parts A to H of `first_gpu_run.py`: what runs in each, and its table."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Found = dict[str, Any]

SIZES = {"layers": 24, "width": 1024, "length": 512, "vocabulary": 32000, "batch": 32, "steps": 10}
SMALL = {"layers": 4, "width": 64, "length": 32, "vocabulary": 512, "batch": 8, "steps": 2}
PLAIN: Found = {
    "kind": "steps",
    "peer": "plain",
    "ranks": 1,
    "microbatches": 1,
    "schedule": "gpipe",
    "precision": "bf16-mixed",
    **dict.fromkeys(("clips", "logs", "compiled", "recompute"), False),
}
OPEN = PLAIN | {"peer": "hybrid"}
TWO = OPEN | {"ranks": 2, "microbatches": 4}
NO_SPEED = "Two ranks share a GPU: their steps, and how long a kernel takes, are not those of two."
STEP, HOST = ("first step, s", "step, ms"), ("launches", "host, ms", "loss")
WORK = ("device, ms", "NCCL, ms")


@dataclass(frozen=True)
class Part:
    """Some runs, and what of them is shown.

    Attributes:
        title: what it is about.
        runs: the config of each, by name.
        columns: names of what its table shows.
        hidden: what two ranks that share a GPU do not show.
        left_out: why it cannot be run here; empty: it can.
    """

    title: str
    runs: Mapping[str, Found]
    columns: Sequence[str]
    hidden: str = NO_SPEED
    left_out: str = ""


def parts_of(devices: int, *, on_gpu: bool) -> dict[str, Part]:
    """All parts by their letter.

    Args:
        devices: how many there are.
        on_gpu: whether these are GPUs.
    """
    columns = (*STEP, *WORK, *HOST)
    scaled = {"16-mixed": TWO | {"precision": "16-mixed"}} if on_gpu else {}
    compiler = not on_gpu or importlib.util.find_spec("triton") is not None
    blocking = {"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}
    return {
        "A": Part(
            "one device, and sizes left open",
            {"plain": PLAIN, "hybrid 1x1": OPEN},
            (*columns, "peak, MiB"),
            hidden="",
        ),
        "B": Part(
            "two stages",
            {"plain": PLAIN, **{f"M = {m}": TWO | {"microbatches": m} for m in (1, 2, 4, 8)}},
            (*columns, "predicted, ms"),
            hidden=f"{NO_SPEED} Predicted is the simulation of two, from times measured here.",
        ),
        "C": Part(
            "two stages, M = 4",
            {
                "nothing more": TWO,
                "clipping, not fused": TWO | {"clips": True},
                **scaled,
                "logging": TWO | {"logs": True},
            },
            columns,
        ),
        "D": Part(
            "compiled",
            {
                "plain": PLAIN,
                "plain, compiled": PLAIN | {"compiled": True},
                "M = 4": TWO,
                "M = 4, compiled": TWO | {"compiled": True},
            },
            columns,
            left_out="" if compiler else "there is no triton, which makes kernels for GPUs",
        ),
        "E": Part(
            "memory",
            {
                "plain": PLAIN,
                "M = 4": TWO,
                "M = 4, recomputed": TWO | {"recompute": True},
                "M = 4, 1f1b": TWO | {"schedule": "1f1b"},
            },
            ("peak, MiB", "reserved, MiB", "outside of torch, MiB", "loss"),
            hidden="Outside of torch is that of both ranks together: contexts, NCCL, libraries.",
            left_out="" if on_gpu else "the memory of a device is what it is about",
        ),
        "F": Part(
            "the first step",
            {
                "plain": PLAIN,
                "empty cache": TWO | {"logs": True, "cache": "new"},
                "full cache": TWO | {"logs": True, "cache": "new", "again": True},
            },
            ("first step, s", "start"),
            hidden="Profiles of two ranks that share a GPU disturb each other.",
        ),
        "G": Part(
            "CUDA_LAUNCH_BLOCKING=1",
            {name: TWO | {"schedule": name} | blocking for name in ("gpipe", "1f1b")},
            ("step, ms", "largest message, MiB", "loss"),
            left_out="" if on_gpu else "it has no effect without a GPU",
        ),
        "H": Part(
            "two devices",
            {
                "hybrid": TWO,
                "ddp": PLAIN | {"peer": "ddp", "ranks": 2},
                "fsdp2": PLAIN | {"peer": "fsdp2", "ranks": 2},
            },
            (*STEP, "host, ms", "loss"),
            left_out="it wants two GPUs: two ranks on one show no speed" if devices < 2 else "",
        ),
    }


def table(found: Found) -> Table:
    """That of a part, from what its runs have found."""
    hidden = found["hidden"] if found["shared"] else ""
    shown = Table("", *found["columns"], title=found["title"], caption=hidden or None)
    for name, run in found["runs"].items():
        if "error" in run:
            shown.add_row(name, f"FAILED: {run['error']}")
            continue
        cells = [_cell(column, run["ranks"], found["shared"]) for column in found["columns"]]
        shown.add_row(name, *cells)
    return shown


def _cell(column: str, ranks: Sequence[Found], shared: bool) -> str:
    """A value of each rank."""
    first = ranks[0]
    if column == "loss":
        return f"{first['losses'][-1]:.4f}"
    if column == "predicted, ms":
        return _number(first.get(column))
    if column == "start":
        named = ((n.removeprefix("hybrid/start/"), s) for n, s in first["start"].items())
        return ", ".join(f"{name.removesuffix('_s')} {s:.2f}" for name, s in named)
    if column == "outside of torch, MiB":
        outside = [rank["used, MiB"] - rank["reserved now, MiB"] for rank in ranks]
        if shared and len(ranks) > 1:
            outside = [ranks[0]["used, MiB"] - sum(rank["reserved now, MiB"] for rank in ranks)]
        return " / ".join(map(_number, outside))
    values = [rank.get(column) for rank in ranks]
    # (the host of the driver waits for the others: all ranks have its steps)
    values = values[:1] if column in STEP else values
    return " / ".join(map(_number, values))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"
