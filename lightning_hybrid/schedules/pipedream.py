"""PipeDream: 1F1B without a flush. Stage k computes with weights that are K - k steps old.

With weights stashed, step t applies the gradient of the loss of batch t at ::

    w_1 of step t - (K - 1),  w_2 of step t - (K - 2),  ...,  w_K of step t
"""

from lightning_hybrid.schedules.look_ahead import LookAhead

PIPEDREAM = LookAhead(
    name="pipedream",
    ahead=lambda k, stages: stages - k,
    barrier="epoch",
    paper="Harlap et al., PipeDream (arXiv 1806.03377; SOSP 2019)",
    trades="stage k of K runs on weights that are K - k steps old",
)
