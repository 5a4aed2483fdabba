"""Read a training step from the trace of a run, to be shown beside the prediction.

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
    """A computation for a micro-batch in a trace.

    Attributes:
        device: index of the device within the replica.
        kind: `forward`, `backward` or `weight`.
        number: number of the micro-batch.
        start_s: its start in seconds; in the result of `measured_step` since the step began.
        end_s: its end in seconds, counted alike.
    """

    device: int
    kind: str
    number: int
    start_s: float
    end_s: float


def measured_step(plan: Plan, folder: str | Path | None) -> list[Work]:
    """Find a step of median length of the first replica in a trace; empty: there is no trace.

    Args:
        plan: The plan of the run.
        folder: Folder of the trace; None: that of `LIGHTNING_HYBRID_TRACE`, if it is set.

    Raises:
        PlanError: a folder was given that has no trace of a step with this plan.
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
    steps = steps[1:] or steps  # without the first one, which is a warm-up
    # the median is not changed by single steps that were disturbed
    steps.sort(key=_length_s)
    chosen = steps[len(steps) // 2]
    begin = min(work.start_s for work in chosen)
    return [
        work._replace(start_s=work.start_s - begin, end_s=work.end_s - begin) for work in chosen
    ]


def _expected(plan: Plan) -> int:
    # number of computations of a whole step
    return (2 * plan.stages + len(plan.split or ())) * plan.microbatches


def _length_s(step: list[Work]) -> float:
    return max(work.end_s for work in step) - min(work.start_s for work in step)


def _work(plan: Plan, folder: Path) -> list[Work]:
    """All computations of the ranks of replica 0 in a trace, in the order of time."""
    found = []
    for path in folder.glob("rank*.json"):
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            device = _device(events)
            if device is not None and device < plan.devices_per_replica:
                found += [work for event in events for work in _from_event(event, device)]
        except (OSError, ValueError, KeyError, TypeError):  # a file of another program
            continue
    return sorted(found, key=lambda work: work.start_s)


def _device(events: list[dict[str, Any]]) -> int | None:
    """The device index of a rank of replica 0, by the title of its trace; None: another replica."""
    title = next(event["args"]["name"] for event in events if event["ph"] == "M")
    match = re.match(r"rank (\d+) \((\w+), replica (\d+)(?:, stage (\d+))?\)", title)
    if match is None or match[3] != "0":
        return None
    # the driver is device 0; a worker of a chain has its stage in the title
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
    """Divide computations into training steps: forwards and the backwards that follow them.

    A step has as many forwards as backwards (weight parts not counted); more forwards before it are
    those of an evaluation, and left out.
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
