"""What a rank knows of its stages before they run."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_hybrid.comm import Group, Links
from lightning_hybrid.network import HookWatch, Stage
from lightning_hybrid.pipeline.early_forwards import EarlyForwards
from lightning_hybrid.schedules import DelayedWeights


@dataclass(frozen=True)
class StageOptions:
    """How the stages of a run compute, the same on all ranks.

    Attributes:
        compiled: by ``torch.compile``.
        statistics: the group over which batch normalisation takes its statistics; ``None``: each
            replica by itself.
        delayed_weights: what the backward of a batch computes with under a delayed schedule.
        shrink: what gradients are multiplied with at every cut that they cross.
    """

    compiled: bool = False
    statistics: Group = None
    delayed_weights: DelayedWeights = "stash"
    shrink: float = 1.0


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
        splits: whether its backward is split; not any more once one could not be.
    """

    number: int
    specializations: list[Stage]
    links: Links
    is_last: bool
    label: str
    early: EarlyForwards
    splits: bool = False

    @contextmanager
    def looks_for_hooks(self) -> Iterator[None]:
        """Inside, hooks are looked for in a forward whose backward may be split."""
        if not self.splits:
            yield
            return
        with HookWatch() as watch:
            yield
        if watch.seen:
            self.go_back_in_one(
                "its forward hooks what it computes (register_hook, retain_grad, grad_fn)"
            )

    def go_back_in_one(self, reason: str) -> None:
        """Do not split the backward any more, and say why."""
        self.splits = False
        warnings.warn(
            f"Stage {self.number} goes back in one from now on, as under schedule='gpipe': "
            f"{reason}.",
            stacklevel=2,
        )
