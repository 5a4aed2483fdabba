"""DDG, decoupled parallel backpropagation with delayed gradients.

In iteration t module k goes back through batch t - (K - k), on the weights of that batch's
iteration. Counted by batches and not by iterations, as here, these are the updates of PipeDream:
stage k applies the gradient of batch t, taken at weights that are K - k of its own updates old.
(The paper's forward is locked: it passes through all modules in each iteration. That is a matter
of time alone, and it is not repeated here.) The learning rate is that of the batch's own turn; the
paper's is that of the iteration that applies it, K - k later.
"""

from lightning_hybrid.schedules.look_ahead import LookAhead

DDG = LookAhead(
    name="ddg",
    ahead=lambda k, stages: stages - k,
    barrier="epoch",
    paper="Huo et al., DDG (ICML 2018, arXiv 1804.10574)",
    trades="stage k of K runs on weights that are K - k steps old",
)
