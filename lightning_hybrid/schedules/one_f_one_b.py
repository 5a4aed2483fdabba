"""1F1B: the batches that Lightning accumulates into one step are the pipeline's micro-batches.

Weights change at the barrier only, so the gradients are those of accumulation on one device, digit
for digit. Stage k holds at most K - k + 1 batches instead of the whole window.
"""

from lightning_hybrid.schedules.look_ahead import LookAhead

ONE_F_ONE_B = LookAhead(
    name="1f1b",
    ahead=lambda k, stages: stages - k,
    barrier="step",
    paper="Narayanan et al., PipeDream-Flush (arXiv 2006.09503)",
)
