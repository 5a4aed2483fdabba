from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

BACKWARD = 2.0
"""Time of a backward pass over that of its forward pass, where a plan has loads alone."""
COLORS = {"forward": "#9cc3e6", "backward": "#f2b279", "weights": "#f2d98c"}


@dataclass(frozen=True)
class Work:
    """What a stage does with a micro-batch.

    Attributes:
        stage: number of the stage.
        microbatch: number of the micro-batch.
        start: when it begins, in seconds, or in passes of the whole network where no times are
            known.
        length: how long it takes, in the same unit.
        kind: ``forward``, ``backward``, or ``weights``: the part of a split backward for the
            weights.
    """

    stage: int
    microbatch: int
    start: float
    length: float
    kind: str


def draw_timeline(plan: Mapping[str, Any]) -> Figure | None:
    """Draw one step of a plan that fills and drains: who computes which micro-batch when.

    Args:
        plan: As its JSON file: ``schedule``, ``microbatches``, and for each stage its ``load`` or
            its times, ``forward_s``, ``backward_s`` and ``weight_s``.

    Returns:
        The figure; None for other schedules, and for plans without loads.
    """
    rows = plan.get("rows", ())
    if plan.get("schedule") not in ("gpipe", "zero_bubble") or len(rows) < 2:
        return None
    timed = all(row.get("forward_s") and row.get("backward_s") for row in rows)
    count = int(plan["microbatches"])
    work = _fill_drain([_lengths(row, timed, count) for row in rows], count)
    figure = Figure(figsize=(11, 0.5 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for piece in work:
        place = (piece.stage, piece.length)
        axes.barh(*place, left=piece.start, color=COLORS[piece.kind], edgecolor="white")
        middle = piece.start + piece.length / 2
        axes.text(middle, piece.stage, str(piece.microbatch), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"stage {stage}" for stage in range(len(rows))])
    axes.invert_yaxis()
    unit = "seconds" if timed else "forward and backward passes of the whole network on one device"
    axes.set_xlabel(f"time, in {unit}")
    title = "forward (blue) and backward (orange) of each micro-batch"
    if any(piece.kind == "weights" for piece in work):
        title += "; yellow: the part of a backward for the weights"
    axes.set_title(title, fontsize=10)
    return figure


def _lengths(row: Mapping[str, Any], timed: bool, count: int) -> tuple[float, float, float]:
    """Of a forward, a backward, and its part for the weights if that is apart."""
    if timed:
        return row["forward_s"], row["backward_s"], row.get("weight_s") or 0.0
    unit = float(row["load"]) / (1 + BACKWARD) / count
    return unit, unit * BACKWARD, 0.0


def _fill_drain(lengths: list[tuple[float, float, float]], count: int) -> list[Work]:
    """All pieces of work of a step; backwards begin with the last micro-batch."""
    free, work = [0.0] * len(lengths), []
    for number in range(count):
        ready = 0.0
        for stage, (forward, *_) in enumerate(lengths):
            start = max(free[stage], ready)
            work.append(Work(stage, number, start, forward, "forward"))
            free[stage] = ready = start + forward
    for number in reversed(range(count)):
        ready = 0.0
        for stage, (_, backward, weights) in reversed([*enumerate(lengths)]):
            start = max(free[stage], ready)
            work.append(Work(stage, number, start, backward, "backward"))
            free[stage] = ready = start + backward
            if weights:
                work.append(Work(stage, number, ready, weights, "weights"))
                free[stage] += weights
    return work
