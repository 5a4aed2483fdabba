"""Streamed schedules: the forward of a batch begins while earlier batches are still under way.

The driver trains on one batch after the other. Before it takes the output of batch t from the
pipeline, it has told stage k (1 .. K) to run forward up to batch t + a_k; a_K is 0. So all a
schedule has to say is its *look-aheads* a_k, and a barrier that none of them crosses::

    K = 3, look-aheads 2 1 0

    stage 1   F0 F1 F2 B0 F3 B1 F4 B2 ...
    stage 2      F0 F1 B0 F2 B1 F3 B2 ...
    stage 3         F0 B0 F1 B1 F2 B2 ...

Every stage steps after the backward of batch t. Where no barrier stands between the forward of a
batch and its turn, stage k runs it with weights that are a_k steps old: the schedule is *delayed*.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_hybrid.schedules.orders import Orders, Part, Work

DelayedWeights = Literal["stash", "recompute", "current"]
"""What the backward of a batch computes with under a delayed schedule: the weights of its forward,
those of now, or those of now beside the activations of then."""


@dataclass(frozen=True)
class LookAhead:
    """A streamed schedule.

    Attributes:
        name: as in a plan.
        ahead: from (k, K), with k = 1 .. K, to a_k; 0 for k = K, and it never rises with k.
        barrier: what no look-ahead crosses: the optimizer's ``step``, or the ``epoch``.
        trades: what is given for the time, in one sentence for the user; empty: nothing.
        plain_sgd: whether its formulas are those of stochastic gradient descent alone.
        shrinks: whether gradients may be multiplied by a factor where they cross a cut.
        paper: where it is from.
    """

    name: str
    ahead: Callable[[int, int], int]
    barrier: Literal["step", "epoch"]
    paper: str
    trades: str = ""
    plain_sgd: bool = False
    shrinks: bool = False

    @property
    def delayed(self) -> bool:
        """Whether forwards run with weights that are older than their turn."""
        return self.barrier == "epoch"

    def look_aheads(self, stages: int) -> tuple[int, ...]:
        """a_1 .. a_K."""
        return tuple(self.ahead(k, stages) for k in range(1, stages + 1))

    def orders(self, stages: int, batches: int) -> Orders:
        """What each stage computes between two barriers, in order."""
        return tuple(_order(a, batches) for a in self.look_aheads(stages))


def _order(ahead: int, batches: int) -> tuple[Work, ...]:
    order: list[Work] = []
    started = 0
    for batch in range(batches):
        last = min(batch + ahead, batches - 1)
        order += [Work(Part.FORWARD, b) for b in range(started, last + 1)]
        order.append(Work(Part.BACKWARD, batch))
        started = last + 1
    return tuple(order)
