"""Time an order of computations, and count what it holds in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import Orders, Part, Work


@dataclass(frozen=True)
class OrderTimes:
    """One step of a replica whose stages have a device each.

    Attributes:
        makespan_s: seconds from the first forward of stage 0 until the last stage is done.
        spans_s: for each stage the seconds from its own first forward until it is done.
        busy_s: for each stage the seconds in which it computes.
        in_flight: for each stage the most micro-batches that have gone forward and not yet wholly
            backward.
        done_s: for each computation of each stage the seconds when it is over.
    """

    makespan_s: float
    spans_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    in_flight: tuple[int, ...]
    done_s: Mapping[tuple[int, Work], float]

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they do not compute."""
        total_s = len(self.busy_s) * self.makespan_s
        return 1 - sum(self.busy_s) / total_s if total_s else 0.0


def time_orders(
    orders: Orders,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] = (),
    *,
    send_s: Sequence[float] = (),
) -> OrderTimes:
    """Run the orders on clocks.

    Args:
        orders: One per stage.
        forward_s: Seconds of a forward of one micro-batch, per stage.
        backward_s: The same for a backward, or for its input part where it is split.
        weight_s: The same for the weight part.
        send_s: Seconds from the end of a computation until its result is at the next stage, for
            each cut; empty: none. Messages do not queue up here, as they do in `simulate`.

    Raises:
        PlanError: a stage waits for what no other computes.
    """
    stages = len(orders)
    seconds = {Part.FORWARD: forward_s, Part.BACKWARD: backward_s, Part.WEIGHT: weight_s}
    sends = (*send_s, 0.0) if len(send_s) else (0.0,) * stages
    clocks, starts, position = [0.0] * stages, [0.0] * stages, [0] * stages
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
        start = max(clocks[k], ready)
        if position[k] == 0:
            starts[k] = start
        done[k, work] = clocks[k] = start + seconds[work.part][k]
        position[k] += 1
        # those that may have waited for it; a stage that is looked at in vain does no harm
        waiting += [i for i in (k - 1, k + 1, k) if 0 <= i < stages]
    stuck = [f"stage {k} at {orders[k][p]}" for k, p in enumerate(position) if p < len(orders[k])]
    if stuck:
        raise PlanError(f"nobody computes what is waited for ({', '.join(stuck)})")
    return OrderTimes(
        makespan_s=max(clocks),
        spans_s=tuple(clock - start for clock, start in zip(clocks, starts)),
        busy_s=tuple(sum(seconds[w.part][k] for w in order) for k, order in enumerate(orders)),
        in_flight=tuple(map(_most_held, orders)),
        done_s=done,
    )


def _ready_s(
    k: int, work: Work, stages: int, done: dict[tuple[int, Work], float], sends: Sequence[float]
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


def _most_held(order: Sequence[Work]) -> int:
    last = Part.WEIGHT if any(w.part is Part.WEIGHT for w in order) else Part.BACKWARD
    held = most = 0
    for work in order:
        held += (work.part is Part.FORWARD) - (work.part is last)
        most = max(most, held)
    return most
