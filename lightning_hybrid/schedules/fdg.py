"""FDG, fully decoupled learning with delayed gradients: nobody waits for anybody.

In iteration t module k forwards batch t - k + 1 and goes back through batch t - 2 K + k + 1.
Between the two of one batch it steps 2 (K - k) - 1 times, and the last module does not. Gradients
may be multiplied by a factor beta at every cut that they cross (gradient shrinking), so that stage
k gets them times beta to the power of K - k.
"""

from lightning_hybrid.schedules.look_ahead import LookAhead

FDG = LookAhead(
    name="fdg",
    ahead=lambda k, stages: max(0, 2 * (stages - k) - 1),
    barrier="epoch",
    paper="Zhuang et al., FDG (TNNLS 33(10):6013, 2022)",
    trades="stage k of K runs on weights that are 2 (K - k) - 1 steps old",
    shrinks=True,
)
