from collections.abc import Mapping, Sequence
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
            its times, ``forward_s``, ``backward_s`` and ``weight_s``. Under ``looped`` also the
            ``device`` of each stage: a device takes turns with its stages.

    Returns:
        The figure; None for other schedules, and for plans without loads.
    """
    rows = plan.get("rows", ())
    if plan.get("schedule") not in ("gpipe", "looped", "zero_bubble") or len(rows) < 2:
        return None
    timed = all(row.get("forward_s") and row.get("backward_s") for row in rows)
    count = int(plan["microbatches"])
    devices = [row.get("device", stage) for stage, row in enumerate(rows)]
    work = _fill_drain([_lengths(row, timed, count) for row in rows], count, devices)
    unit = "seconds" if timed else "forward and backward passes of the whole network on one device"
    return _draw(work, devices, f"time, in {unit}")


def _draw(work: Sequence[Work], devices: Sequence[int], time: str) -> Figure:
    """Draw a lane for each stage, or for each device if that has several."""
    order = list(dict.fromkeys(devices))  # as the network passes them
    shared = len(order) < len(devices)
    lanes = [f"device {k}" for k in order] if shared else [f"stage {k}" for k in range(len(order))]
    figure = Figure(figsize=(11, 0.5 * len(lanes) + 1.2), layout="constrained")
    axes = figure.subplots()
    for piece in work:
        lane = order.index(devices[piece.stage])
        axes.barh(lane, piece.length, left=piece.start, color=COLORS[piece.kind], edgecolor="white")
        middle = piece.start + piece.length / 2
        label = f"{piece.stage}.{piece.microbatch}" if shared else f"{piece.microbatch}"
        axes.text(middle, lane, label, ha="center", va="center", fontsize=6 if shared else 8)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    title = "forward (blue) and backward (orange) of each micro-batch"
    if shared:
        title += " by each stage, as stage.micro-batch"
    if any(piece.kind == "weights" for piece in work):
        title += "; yellow: the part of a backward for the weights"
    axes.set_xlabel(time)
    axes.set_title(title, fontsize=10)
    return figure


def why_no_timeline(plan: Mapping[str, Any]) -> str:
    """Why `draw_timeline` draws nothing for a plan, and how to get a picture."""
    if len(plan.get("rows", ())) < 2:
        why = "of fewer than two stages, or of stages whose loads are not known"
    else:
        why = f"of schedule {plan.get('schedule')}, a step of which is not drawn here"
    return (
        f"No timeline: this is a plan {why}. The page of the plan shows what is known of its step:"
    )


def _lengths(row: Mapping[str, Any], timed: bool, count: int) -> tuple[float, float, float]:
    """Of a forward, a backward, and its part for the weights if that is apart."""
    if timed:
        return row["forward_s"], row["backward_s"], row.get("weight_s") or 0.0
    unit = float(row["load"]) / (1 + BACKWARD) / count
    return unit, unit * BACKWARD, 0.0


def _fill_drain(
    lengths: Sequence[tuple[float, float, float]], count: int, devices: Sequence[int]
) -> list[Work]:
    """All pieces of work of a step; backwards begin with the last micro-batch.

    A device takes what is of several stages in the order in which it would be done if each had a
    device of its own and all took the same time, the earlier stage first.
    """
    stages, free = len(lengths), dict.fromkeys(devices, 0.0)
    ready = [[0.0] * count for _ in range(stages + 1)]
    work = []

    def take(stage: int, number: int, start: float, length: float, kind: str) -> float:
        start = max(free[devices[stage]], start)
        work.append(Work(stage, number, start, length, kind))
        free[devices[stage]] = start + length
        return start + length

    turns = [(s + n, s, n) for s in range(stages) for n in range(count)]
    for _, stage, number in sorted(turns):
        end = take(stage, number, ready[stage][number], lengths[stage][0], "forward")
        ready[stage + 1][number] = end
    turns = [(stages - 1 - s + count - 1 - n, s, n) for s in range(stages) for n in range(count)]
    for _, stage, number in sorted(turns):
        _, backward, weights = lengths[stage]
        end = take(stage, number, ready[stage + 1][number], backward, "backward")
        ready[stage][number] = end
        if weights:
            take(stage, number, end, weights, "weights")
    return work
