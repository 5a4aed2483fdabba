"""A training step out of the trace of a run, to be shown beside what was predicted.

The files are those of `LIGHTNING_HYBRID_TRACE`, see `lightning_hybrid.stage.trace`.
"""

import json
import os
import re
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.plan import Plan

VARIABLE = "LIGHTNING_HYBRID_TRACE"
_NAME = re.compile(r"(?:.*\s)?(forward|backward|weight) (\d+)")


class Work(NamedTuple):
    """A forward or a backward of a micro-batch, as traced.

    Attributes:
        device: its number within the replica.
        kind: `forward`, `backward` or `weight`.
        number: of the micro-batch.
        start_s: when it begins, in seconds; of a whole step: since its first forward began.
        end_s: likewise, when it is over.
    """

    device: int
    kind: str
    number: int
    start_s: float
    end_s: float


def measured_step(plan: Plan, folder: str | Path | None) -> list[Work]:
    """A step of median length of the first replica, from its first forward on; empty: no trace.

    Args:
        plan: What was run.
        folder: Of the trace; None: that of the environment, if there is one.

    Raises:
        PlanError: a folder was given, and it has no trace of a step of such a plan.
    """
    asked = folder is not None
    folder = folder or os.environ.get(VARIABLE)
    if not folder:
        return []
    steps = [step for step in _steps(_work(plan, Path(folder))) if len(step) == _expected(plan)]
    if not steps:
        if asked:
            raise PlanError(
                f"{str(folder)!r} holds no trace of a training step with {plan.stages} stages and "
                f"{plan.microbatches} micro-batches: run with {VARIABLE}={folder} in the "
                "environment, and give the plan of that run"
            )
        return []
    steps = steps[1:] or steps  # the first one warms up
    # a median is not moved by a step that waited for something else
    steps.sort(key=_length_s)
    chosen = steps[len(steps) // 2]
    begin = min(work.start_s for work in chosen)
    return [
        work._replace(start_s=work.start_s - begin, end_s=work.end_s - begin) for work in chosen
    ]


def _expected(plan: Plan) -> int:
    # steps that an evaluation or the end of the trace has cut short have fewer
    return (2 * plan.stages + len(plan.split or ())) * plan.microbatches


def _length_s(step: list[Work]) -> float:
    return max(work.end_s for work in step) - min(work.start_s for work in step)


def _work(plan: Plan, folder: Path) -> list[Work]:
    """All work of the ranks of replica 0, in the order of time."""
    found = []
    for path in folder.glob("rank*.json"):
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            device = _device(events)
            if device is not None and device < plan.devices_per_replica:
                found += [work for event in events for work in _from_event(event, device)]
        except (OSError, ValueError, KeyError, TypeError):  # another program's file
            continue
    return sorted(found, key=lambda work: work.start_s)


def _device(events: list[dict[str, Any]]) -> int | None:
    """The place of a rank within replica 0 by the title of its trace; None: of another replica."""
    title = next(event["args"]["name"] for event in events if event["ph"] == "M")
    match = re.match(r"rank (\d+) \((\w+), replica (\d+)(?:, stage (\d+))?\)", title)
    if match is None or match[3] != "0":
        return None
    # the driver is device 0 whatever its stage; a worker in a chain is told by its own
    if match[2] == "driver":
        return 0
    return int(match[4]) + 1 if match[4] is not None else int(match[1])


def _from_event(event: dict[str, Any], device: int) -> list[Work]:
    match = _NAME.fullmatch(event["name"]) if event["ph"] == "X" else None
    if match is None:
        return []
    start_s, length_s = event["ts"] / 1e6, event["dur"] / 1e6
    return [Work(device, match[1], int(match[2]), start_s, start_s + length_s)]


def _steps(works: list[Work]) -> list[list[Work]]:
    """Training steps: runs of forwards, each with the backwards that follow.

    Forwards of an evaluation before them are left out: there are as many as backwards, whose weight
    parts are extra.
    """
    steps = []
    forwards: list[Work] = []
    for is_forward, group in groupby(works, key=lambda work: work.kind == "forward"):
        part = list(group)
        if is_forward:
            forwards = part
        elif forwards:
            count = sum(work.kind == "backward" for work in part)
            steps.append([*forwards[-count:], *part])
    return steps
