"""What tests ask of orders of computations beside when each is over."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.planning import streamed_time
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
    """Run the orders on clocks, see `streamed_time.time_orders`."""
    done = streamed_time.time_orders(orders, *seconds, **sends)
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
