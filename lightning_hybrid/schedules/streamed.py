"""Streamed schedules: the forward of a batch begins before earlier batches are finished.

The driver trains on one batch after the other. Before it takes the output of batch t from the
pipeline, it has told stage k (1 .. K) to run forwards up to batch t + a_k; a_K is 0. So a schedule
is given by its *look-aheads* a_k, and by a barrier that they do not cross::

    K = 3, look-aheads 2 1 0

    stage 1   F0 F1 F2 B0 F3 B1 F4 B2 ...
    stage 2      F0 F1 B0 F2 B1 F3 B2 ...
    stage 3         F0 B0 F1 B1 F2 B2 ...

Every stage steps its optimizer after the backward of batch t. If no barrier is in between, stage k
runs the forward of a batch with weights that are a_k steps old: the schedule is *delayed*.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

DelayedWeights = Literal["stash", "recompute", "current"]
"""What a backward uses under a delayed schedule: "stash": the weights and activations of its
forward; "recompute": the current weights, and activations that are recomputed with them; "current":
the current weights, and the activations of the forward. Carried out in
``stage/early_forwards.py``."""


@dataclass(frozen=True)
class LookAhead:
    """A streamed schedule, given by its look-aheads.

    Attributes:
        name: name of the schedule, as in a plan.
        ahead: function from (k, K) to the look-ahead a_k of stage k = 1 .. K: how many batches it
            is ahead of the driver. It never rises with k, and is 0 for k = K.
        barrier: what no look-ahead crosses: the optimizer's ``step``, or the end of the ``epoch``.
        paper: reference.
        trades: how training differs from that on one device, in a sentence for the user; empty: it
            does not differ.
        plain_sgd: whether the schedule is defined for stochastic gradient descent alone; other
            optimizers are then refused.
        shrinks: whether gradients may be multiplied by a factor where they cross a cut
            (`Delayed(shrink=...)`).
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
        """Whether a forward may run with older weights than one device would use for its batch.

        That is so if look-aheads cross optimizer steps.
        """
        return self.barrier == "epoch"

    def look_aheads(self, stages: int) -> tuple[int, ...]:
        """By stage, from the first to the last: how many batches it is ahead of the driver.

        Args:
            stages: number of stages.
        """
        return tuple(self.ahead(k, stages) for k in range(1, stages + 1))


STREAMED = {
    each.name: each
    for each in (
        # The batches that Lightning accumulates into one step are the micro-batches of the
        # pipeline. Weights change at the barrier only, so the gradients are those of accumulation
        # on one device, digit for digit.
        LookAhead(
            name="1f1b_stream",
            ahead=lambda k, stages: stages - k,
            barrier="step",
            paper="Narayanan et al., PipeDream-Flush (arXiv 2006.09503)",
        ),
        # 1F1B without a flush. With weights stashed, step t applies the gradient of the loss of
        # batch t at w_1 of step t - (K - 1), w_2 of step t - (K - 2), ..., w_K of step t.
        LookAhead(
            name="pipedream",
            ahead=lambda k, stages: stages - k,
            barrier="epoch",
            paper="Harlap et al., PipeDream (arXiv 1806.03377; SOSP 2019)",
            trades="stage k of K runs on weights that are K - k steps old",
        ),
        # In iteration t module k goes back through batch t - (K - k), on the weights of that
        # batch's iteration. Counted by batches and not by iterations, as here, these are the
        # updates of PipeDream: stage k applies the gradient of batch t, taken at weights that are
        # K - k of its own updates old. (The paper's forward is locked: it passes through all
        # modules in each iteration. That is a matter of time alone, and it is not repeated here.)
        # The learning rate is that of the batch's own turn; the paper's is that of the iteration
        # that applies it, K - k later.
        LookAhead(
            name="ddg",
            ahead=lambda k, stages: stages - k,
            barrier="epoch",
            paper="Huo et al., DDG (ICML 2018, arXiv 1804.10574)",
            trades="stage k of K runs on weights that are K - k steps old",
        ),
        # No module waits for another: in iteration t module k runs batch t - k + 1 forward and
        # batch t - 2 K + k + 1 backward. Between the two of one batch it steps 2 (K - k) - 1 times,
        # and the last module does not. Gradients may be multiplied by a factor beta at every cut
        # that they cross (gradient shrinking), so that stage k gets them times beta ** (K - k).
        LookAhead(
            name="fdg",
            ahead=lambda k, stages: max(0, 2 * (stages - k) - 1),
            barrier="epoch",
            paper="Zhuang et al., FDG (TNNLS 33(10):6013, 2022)",
            trades="stage k of K runs on weights that are 2 (K - k) - 1 steps old",
            shrinks=True,
        ),
        # Partition i updates with a plain step of gradient descent, at the counter t - i + 1:
        #
        #     w^(t-i+2) = w^(t-i+1) - rate * gradient^(t-i+1)
        #
        # Taken as batch numbers, these would make the last partition the most delayed, and the
        # gradient of a batch would be needed before it exists. t - i + 1 is the number of the
        # batch that module i *forwards* in iteration t of FDG, where the pipeline flows as in
        # their figures. So partition i is read as having a counter of its own, and the schedule is
        # that of FDG without shrinking. A reconstruction: the paper says nothing on stashed
        # weights or the end of an epoch.
        LookAhead(
            name="akintoye",
            ahead=lambda k, stages: max(0, 2 * (stages - k) - 1),
            barrier="epoch",
            paper="Akintoye et al. (IEEE Access 10:77950, 2022), Eq. 1 and 2",
            trades="stage k of K runs on weights that are 2 (K - k) - 1 steps old",
            plain_sgd=True,
        ),
    )
}
"""The streamed schedules, by their name in a plan."""
