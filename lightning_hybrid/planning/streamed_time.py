"""What a batch takes under a streamed schedule."""

from collections.abc import Mapping, Sequence

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import LookAhead, Orders, Part, Work

_FULL, _LOOKED_AT = 24, 12
"""Batches until the pipeline is full, beside those that are looked ahead to, and batches over which
the time of one is the mean: stages may take turns over 2, 3, 4 or 6 batches."""


def batch_s(schedule: LookAhead, costs: StepCosts, microbatches: int) -> float:
    """Seconds from one batch to the next, in the steady state.

    The optimizer step is taken after each batch, and the all-reduce is not hidden: of 1F1B, which
    steps once per window, both are overestimates.

    Args:
        schedule: the schedule.
        costs: of the stages, each on a device of its own.
        microbatches: into how many each batch is split.
    """
    stages = len(costs.forward_s)
    first = _FULL + 2 * max(schedule.look_aheads(stages))
    # what is left of the all-reduce, which begins beside the last micro-batch, and of the step
    rest_s = [
        max(0.0, reduce - backward) + step
        for reduce, backward, step in zip(costs.reduce_s, costs.backward_s, costs.step_s)
    ]
    done_s = time_orders(
        schedule.orders(stages, 2 * first + _LOOKED_AT),  # of which the middle is steady
        [microbatches * forward for forward in costs.forward_s],
        [microbatches * backward + rest for backward, rest in zip(costs.backward_s, rest_s)],
        send_s=[microbatches * s + late for s, late in zip(costs.send_s, costs.latency_s)],
    )
    begin_s, end_s = (
        done_s[0, Work(Part.BACKWARD, number)] for number in (first, first + _LOOKED_AT)
    )
    return (end_s - begin_s) / _LOOKED_AT


def time_orders(
    orders: Orders,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] = (),
    *,
    send_s: Sequence[float] = (),
) -> Mapping[tuple[int, Work], float]:
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
    done: dict[tuple[int, Work], float] = {}
    # stages are taken as they become ready, since look-aheads follow no common clock
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
    work: Work,
    stages: int,
    done: dict[tuple[int, Work], float],
    sends: Sequence[float],
) -> float | None:
    """When what a computation needs is there; None: it has not been computed yet."""
    if work.part is Part.WEIGHT:
        return done.get((k, Work(Part.BACKWARD, work.microbatch)))
    if work.part is Part.FORWARD:
        if k == 0:
            return 0.0
        sent, edge = done.get((k - 1, work)), k - 1
    elif k == stages - 1:
        return done.get((k, Work(Part.FORWARD, work.microbatch)))
    else:
        sent, edge = done.get((k + 1, work)), k
    return None if sent is None else sent + sends[edge]
