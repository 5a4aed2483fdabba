"""What a batch takes under a streamed schedule, and what the devices do in that time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import LookAhead, Orders, Part
from lightning_hybrid.schedules import Work as Computation

_FULL, _MOST = 24, 12
"""Batches until the pipeline is full, beside those that are looked ahead to, and the most batches
after which what the devices do is taken to repeat."""


@dataclass(frozen=True, kw_only=True)
class StreamedWork:
    """What a stage does in the steady state.

    Attributes:
        stage: number of the stage.
        kind: what it does.
        batch: number of the batch, 0 for the one that the last stage begins with.
        start_s: seconds since that begins; not below 0.
        end_s: likewise, when it is over; not above the end of the time that is shown.
    """

    stage: int
    kind: Literal["forward", "backward", "reduce", "step"]
    batch: int
    start_s: float
    end_s: float


def batch_s(schedule: LookAhead, costs: StepCosts, microbatches: int) -> float:
    """Seconds from one batch to the next, in the steady state.

    The optimizer step is taken after each batch, and the all-reduce is not hidden: of 1F1B, which
    steps once per window, both are overestimates.

    Args:
        schedule: the schedule.
        costs: of the stages, each on a device of its own.
        microbatches: into how many each batch is split.
    """
    batches, seconds = _cycle(_done_s(schedule, costs, microbatches), _full(schedule, costs))
    return seconds / batches


def steady_batches(
    schedule: LookAhead, costs: StepCosts, microbatches: int
) -> tuple[int, list[StreamedWork]]:
    """What all stages do in the steady state until everything repeats.

    It begins with a forward of the last stage. What is under way at one of its ends is cut off
    there: it goes on at the other, with the number of another batch.

    Args:
        schedule: the schedule.
        costs: of the stages, each on a device of its own.
        microbatches: into how many each batch is split.

    Returns:
        The number of batches after which it repeats, each of `batch_s` seconds, and the work.
    """
    done_s, first = _done_s(schedule, costs, microbatches), _full(schedule, costs)
    batches, length_s = _cycle(done_s, first)
    last = len(costs.forward_s) - 1
    begin_s = done_s[last, Computation(Part.FORWARD, first)] - microbatches * costs.forward_s[last]
    works = []
    for (stage, what), done in done_s.items():
        for kind, start_s, end_s in _spans(costs, microbatches, stage, what.part, done):
            start_s, end_s = max(0.0, start_s - begin_s), min(length_s, end_s - begin_s)
            if end_s - start_s > 1e-9 * length_s:
                works.append(
                    StreamedWork(
                        stage=stage,
                        kind=kind,
                        batch=what.microbatch - first,
                        start_s=start_s,
                        end_s=end_s,
                    )
                )
    return batches, sorted(works, key=lambda work: (work.stage, work.start_s))


def _cycle(done_s: Mapping[tuple[int, Computation], float], first: int) -> tuple[int, float]:
    """After how many batches from this one on the pipeline does the same again, and seconds."""
    for batches in range(1, _MOST + 1):
        lengths = [
            done_s[stage, Computation(part, number + batches)]
            - done_s[stage, Computation(part, number)]
            for stage, (part, number) in done_s
            if first <= number < first + _MOST
        ]
        if max(lengths) - min(lengths) <= 1e-6 * max(lengths):
            break
    return batches, sum(lengths) / len(lengths)


def _full(schedule: LookAhead, costs: StepCosts) -> int:
    return _FULL + 2 * max(schedule.look_aheads(len(costs.forward_s)))


def _done_s(
    schedule: LookAhead, costs: StepCosts, microbatches: int
) -> Mapping[tuple[int, Computation], float]:
    """When all computations of a stream are over, of which the middle is in the steady state."""
    stages = len(costs.forward_s)
    send = [s * microbatches + late for s, late in zip(costs.send_s, costs.latency_s)]
    return time_orders(
        schedule.orders(stages, 2 * _full(schedule, costs) + _MOST),
        [microbatches * f for f in costs.forward_s],
        [sum(_after_forward_s(costs, microbatches, stage)) for stage in range(stages)],
        send_s=send,
    )


def _after_forward_s(costs: StepCosts, microbatches: int, stage: int) -> tuple[float, float, float]:
    """Seconds of the backward, of what is left of the all-reduce then, and of the step."""
    backward = costs.backward_s[stage]
    left = max(0.0, costs.reduce_s[stage] - backward)
    return microbatches * backward, left, costs.step_s[stage]


def _spans(
    costs: StepCosts, microbatches: int, stage: int, part: Part, end_s: float
) -> Iterator[tuple[Literal["forward", "backward", "reduce", "step"], float, float]]:
    """Kind, start and end of what one computation of an order consists of."""
    if part is Part.FORWARD:
        yield "forward", end_s - microbatches * costs.forward_s[stage], end_s
        return
    backward, rest, step = _after_forward_s(costs, microbatches, stage)
    over_s = end_s - step - rest
    yield "backward", over_s - backward, over_s
    start_s = over_s - costs.backward_s[stage]  # beside the last micro-batch
    yield "reduce", start_s, start_s + costs.reduce_s[stage]
    yield "step", end_s - step, end_s


def time_orders(
    orders: Orders,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] = (),
    *,
    send_s: Sequence[float] = (),
) -> Mapping[tuple[int, Computation], float]:
    """Run the orders on clocks; each stage has a device of its own.

    Args:
        orders: One per stage.
        forward_s: Seconds of a forward of one micro-batch, per stage.
        backward_s: The same for a backward, or for its input part where it is split.
        weight_s: The same for the weight part.
        send_s: Seconds from the end of a computation until its result is at the next stage, for
            each cut; empty: none. Messages do not queue up here, as they do in `simulate`.

    Returns:
        For each computation of each stage the seconds when it is over.

    Raises:
        PlanError: a stage waits for what no other computes.
    """
    stages = len(orders)
    seconds = {Part.FORWARD: forward_s, Part.BACKWARD: backward_s, Part.WEIGHT: weight_s}
    sends = (*send_s, 0.0) if len(send_s) else (0.0,) * stages
    clocks, position = [0.0] * stages, [0] * stages
    done: dict[tuple[int, Computation], float] = {}
    waiting = list(range(stages))
    while waiting:
        k = waiting.pop()
        if position[k] == len(orders[k]):
            continue
        work = orders[k][position[k]]
        ready = _ready_s(k, work, stages, done, sends)
        if ready is None:
            continue
        done[k, work] = clocks[k] = max(clocks[k], ready) + seconds[work.part][k]
        position[k] += 1
        # those that may have waited for it; a stage that is looked at in vain does no harm
        waiting += [i for i in (k - 1, k + 1, k) if 0 <= i < stages]
    stuck = [f"stage {k} at {orders[k][p]}" for k, p in enumerate(position) if p < len(orders[k])]
    if stuck:
        raise PlanError(f"nobody computes what is waited for ({', '.join(stuck)})")
    return done


def _ready_s(
    k: int,
    work: Computation,
    stages: int,
    done: dict[tuple[int, Computation], float],
    sends: Sequence[float],
) -> float | None:
    """When what a computation needs is there; None: it has not been computed yet."""
    if work.part is Part.WEIGHT:
        return done.get((k, Computation(Part.BACKWARD, work.microbatch)))
    if work.part is Part.FORWARD:
        if k == 0:
            return 0.0
        sent, edge = done.get((k - 1, work)), k - 1
    elif k == stages - 1:
        return done.get((k, Computation(Part.FORWARD, work.microbatch)))
    else:
        sent, edge = done.get((k + 1, work)), k
    return None if sent is None else sent + sends[edge]
