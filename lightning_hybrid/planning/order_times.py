"""Time an order of computations."""

from collections.abc import Mapping, Sequence

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import Orders, Part, Work


def time_orders(
    orders: Orders,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    send_s: Sequence[float] = (),
) -> Mapping[tuple[int, Work], float]:
    """Run the orders on clocks.

    Args:
        orders: One per stage.
        forward_s: Seconds of a forward of one micro-batch, per stage.
        backward_s: The same for a backward.
        send_s: Seconds from the end of a computation until its result is at the next stage, for
            each cut; empty: none. Messages do not queue up here, as they do in `simulate`.

    Returns:
        For each computation of each stage, which has a device of its own, the seconds from the
        first forward of stage 0 until it is over.

    Raises:
        PlanError: a stage waits for what no other computes.
    """
    stages = len(orders)
    seconds = {Part.FORWARD: forward_s, Part.BACKWARD: backward_s}
    sends = (*send_s, 0.0) if len(send_s) else (0.0,) * stages
    clocks, position = [0.0] * stages, [0] * stages
    done: dict[tuple[int, Work], float] = {}
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
    k: int, work: Work, stages: int, done: dict[tuple[int, Work], float], sends: Sequence[float]
) -> float | None:
    """When what a computation needs is there; None: it has not been computed yet."""
    if work.part is Part.FORWARD:
        if k == 0:
            return 0.0
        sent, edge = done.get((k - 1, work)), k - 1
    elif k == stages - 1:
        return done.get((k, Work(Part.FORWARD, work.microbatch)))
    else:
        sent, edge = done.get((k + 1, work)), k
    return None if sent is None else sent + sends[edge]
