"""Predict the time of a batch under a streamed schedule."""

from collections.abc import Mapping, Sequence

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import LookAhead, Orders, Part, Work

_FULL, _LOOKED_AT = 24, 12
"""Batches that are simulated until the pipeline is full, beside the look-ahead; and batches over
which the time is averaged, since the pattern may repeat after 2, 3, 4 or 6 batches."""


def batch_s(schedule: LookAhead, costs: StepCosts, microbatches: int) -> float:
    """Seconds from one batch to the next, in the steady state.

    All-reduce and optimizer step are counted for each batch, which is too much for 1F1B: it steps
    once per accumulation window.

    Args:
        schedule: the schedule.
        costs: times of the stages, each on a device of its own.
        microbatches: number of micro-batches of each batch.
    """
    stages = len(costs.forward_s)
    first = _FULL + 2 * max(schedule.look_aheads(stages))
    # the part of the all-reduce that the last micro-batch does not overlap, and the step
    rest_s = [
        max(0.0, reduce - backward) + step
        for reduce, backward, step in zip(costs.reduce_s, costs.backward_s, costs.step_s)
    ]
    done_s = time_orders(
        schedule.orders(stages, 2 * first + _LOOKED_AT),  # the steady state is in the middle
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
    """Simulate stages that compute in given orders; each stage has a device of its own.

    Args:
        orders: The computations of each stage, in order.
        forward_s: Seconds of a forward of one micro-batch, per stage.
        backward_s: Seconds of a backward, or of its input part if it is split, per stage.
        weight_s: Seconds of the weight part of a backward, per stage.
        send_s: Seconds from the end of a computation until its result is at the next stage, for
            each cut; empty: none. Messages do not wait for each other, as they do in `simulate`.

    Returns:
        By stage and computation, the time of its end in seconds.

    Raises:
        PlanError: a stage waits for something that no other one computes.
    """
    stages = len(orders)
    seconds = {Part.FORWARD: forward_s, Part.BACKWARD: backward_s, Part.WEIGHT: weight_s}
    sends = (*send_s, 0.0) if len(send_s) else (0.0,) * stages
    clocks, position = [0.0] * stages, [0] * stages
    done: dict[tuple[int, Work], float] = {}
    # a stage is tried again whenever it or a neighbour has computed something
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
        # these may have waited for it
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
    """When the inputs of a computation have arrived; None: they are not computed yet."""
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
