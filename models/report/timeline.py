from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

BACKWARD = 2.0
"""Time of a backward pass over that of its forward pass."""


def draw_timeline(plan: Mapping[str, Any]) -> Figure | None:
    """Draw one step of a fill-drain plan: who computes which micro-batch when.

    Args:
        plan: As its JSON file: ``schedule``, ``microbatches`` and a ``load`` for each stage.

    Returns:
        The figure; None for other schedules, and for plans without loads.
    """
    loads = [float(row["load"]) for row in plan.get("rows", ())]
    if plan.get("schedule") != "gpipe" or len(loads) < 2:
        return None
    count = int(plan["microbatches"])
    figure = Figure(figsize=(11, 0.5 * len(loads) + 1.2), layout="constrained")
    axes = figure.subplots()
    for stage, micro, start, length, forward in _fill_drain(loads, count):
        color = "#9cc3e6" if forward else "#f2b279"
        axes.barh(stage, length, left=start, color=color, edgecolor="white")
        axes.text(start + length / 2, stage, str(micro), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(loads)), [f"stage {stage}" for stage in range(len(loads))])
    axes.invert_yaxis()
    axes.set_xlabel("time, in forward and backward passes of the whole network on one device")
    axes.set_title("forward (blue) and backward (orange) of each micro-batch", fontsize=10)
    return figure


def _fill_drain(loads: list[float], count: int) -> list[tuple[int, int, float, float, bool]]:
    """(stage, micro-batch, start, length, whether forward) of every piece of work."""
    unit = 1 / (1 + BACKWARD) / count
    free = [0.0] * len(loads)
    work = []
    for micro in range(count):
        ready = 0.0
        for stage, load in enumerate(loads):
            start, length = max(free[stage], ready), load * unit
            work.append((stage, micro, start, length, True))
            free[stage] = ready = start + length
    for micro in range(count):
        ready = max(free[-1], 0.0)
        for stage in reversed(range(len(loads))):
            start, length = max(free[stage], ready), loads[stage] * unit * BACKWARD
            work.append((stage, micro, start, length, False))
            free[stage] = ready = start + length
    return work
