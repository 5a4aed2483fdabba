"""The delayed gradients of Akintoye et al. 2022, Eq. 1 and 2, in the reading that computes.

Partition i updates with a plain step of gradient descent, at the counter t - i + 1::

    w^(t-i+2) = w^(t-i+1) - rate * gradient^(t-i+1)

Taken as batch numbers, these would make the last partition the most delayed, and the gradient of a
batch would be needed before it exists. t - i + 1 is the number of the batch that module i
*forwards* in iteration t of FDG, where the pipeline flows as in their figures. So partition i is
read as having a counter of its own, and the schedule is that of FDG without shrinking. A
reconstruction: the paper says nothing on stashed weights or the end of an epoch.
"""

from lightning_hybrid.schedules.look_ahead import LookAhead

AKINTOYE = LookAhead(
    name="akintoye",
    ahead=lambda k, stages: max(0, 2 * (stages - k) - 1),
    barrier="epoch",
    paper="Akintoye et al. (IEEE Access 10:77950, 2022), Eq. 1 and 2",
    trades="stage k of K runs on weights that are 2 (K - k) - 1 steps old",
    plain_sgd=True,
)
