"""What a rank knows of its stages before they run."""

from dataclasses import dataclass

from lightning_hybrid.comm.links import Links
from lightning_hybrid.comm.transport import Group
from lightning_hybrid.network import Stage
from lightning_hybrid.pipeline.early import DelayedWeights, EarlyForwards


@dataclass(frozen=True)
class StageOptions:
    """How the stages of a run compute, the same on all ranks.

    Attributes:
        compiled: by ``torch.compile``.
        statistics: the group over which batch normalisation takes its statistics; ``None``: each
            replica by itself.
        delayed_weights: what the backward of a batch computes with under a delayed schedule.
        shrink: what gradients are multiplied with at every cut that they cross.
        recompute: whether forwards keep no activations, and run again for their backward.
    """

    compiled: bool = False
    statistics: Group = None
    delayed_weights: DelayedWeights = "stash"
    shrink: float = 1.0
    recompute: bool = False


@dataclass
class OwnedStage:
    """A stage of this rank.

    Attributes:
        number: of the stage in the network.
        specializations: the part of the network that it is, in each of its graphs (see
            :class:`CallKey`); the first one is enough to begin with.
        links: to its neighbours.
        is_last: whether it is the network's last stage.
        label: what tells it from other stages of the rank in a trace.
        early: its forwards that run before their turn.
    """

    number: int
    specializations: list[Stage]
    links: Links
    is_last: bool
    label: str
    early: EarlyForwards
