"""Orders of computations on clocks: when each is over, and what tests ask beside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orders import Orders, Part, Work

from lightning_hybrid.errors import PlanError


@dataclass(frozen=True)
class OrderTimes:
    """One step of a replica whose stages have a device each.

    Attributes:
        makespan_s: seconds from the first forward of stage 0 until the last stage is done.
        spans_s: for each stage the seconds from its own first forward until it is done.
        busy_s: for each stage the seconds in which it computes.
        in_flight: for each stage the most micro-batches that have gone forward and not yet wholly
            backward.
    """

    makespan_s: float
    spans_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they do not compute."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s)


def time_orders(orders: Orders, *seconds: Sequence[float], **sends: Any) -> OrderTimes:
    """Run the orders on clocks, see `ends_of_orders`."""
    done = ends_of_orders(orders, *seconds, **sends)
    taken = dict(zip((Part.FORWARD, Part.BACKWARD, Part.WEIGHT), seconds))
    over = [done[k, order[-1]] for k, order in enumerate(orders)]
    begun = [done[k, order[0]] - taken[order[0].part][k] for k, order in enumerate(orders)]
    return OrderTimes(
        makespan_s=max(over),
        spans_s=tuple(end - start for end, start in zip(over, begun)),
        busy_s=tuple(sum(taken[w.part][k] for w in order) for k, order in enumerate(orders)),
        in_flight=tuple(map(_most_held, orders)),
    )


def _most_held(order: Sequence[Work]) -> int:
    last = Part.WEIGHT if any(w.part is Part.WEIGHT for w in order) else Part.BACKWARD
    held = most = 0
    for work in order:
        held += (work.part is Part.FORWARD) - (work.part is last)
        most = max(most, held)
    return most


def ends_of_orders(
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
