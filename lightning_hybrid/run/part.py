"""The protocol between a run and its parts: what a run does only where a user has asked for it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.driver import Driver
from lightning_hybrid.planning import Plan


class Part:
    """A part of a run on a driver: hooks that :class:`DriverSession` calls; by default none acts.

    A session calls each hook of all parts, in the order of its list. Of one run:

    1. :meth:`begin`, with the driver; then :meth:`begin_training`, with the optimizers.
    2. :meth:`train_loader`, whenever the Trainer makes a loader.
    3. For each training batch: :meth:`move_batch`; handlers of signals run; :meth:`new_plans`, and
       if a part has some, :meth:`cuts_decided` of all and :meth:`begin`, with another driver;
       :meth:`batch_starts`; :meth:`step`, around the user's code.
    4. For each backward of it: :meth:`weigh_loss`; autograd runs; :meth:`backward_is_over`;
       replicas average their gradients; :meth:`gradients_are_averaged`.
    5. :meth:`fence`, whenever replicas are about to do something together, validations and the end
       of the training among it; around a validation :meth:`pause` and :meth:`resume`.
    6. After the fence at the end of the training :meth:`last_batch_is_over`; handlers of signals
       run, and calls that have begun early are dropped; :meth:`training_ends`.
    7. :meth:`close`, after the weights were brought to the driver.

    Attributes:
        agrees_to_end: whether replicas agree, while they average gradients, that one was told to
            end. Then all of them run handlers of signals before a batch, and none after a backward.
    """

    agrees_to_end = False

    def begin(self, driver: Driver) -> None:
        """Stages are there: at the beginning of the run, and after they were cut anew.

        Args:
            driver: of these stages.
        """

    def begin_training(self, optimizers: Sequence[Optimizer]) -> None:
        """The optimizers are connected.

        Args:
            optimizers: the user's.

        Raises:
            PlanError: the part does not go together with them, or with the Trainer's options.
        """

    def train_loader(self, loader: Any) -> Any:
        """Return what a Trainer that trains is to use in the place of a loader."""
        return loader

    def move_batch(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Return a batch on its device.

        Args:
            batch: where it is now.
            move: brings it there.
        """
        return move(batch)

    def new_plans(self) -> Mapping[str, Plan]:
        """Return plans by which to cut stages anew before this batch, by name of the network.

        Empty: stages stay. All drivers return the same.
        """
        return {}

    def cuts_decided(self, plans: Mapping[str, Plan], reason: str) -> None:
        """New plans were found.

        Args:
            plans: by name of the network.
            reason: why stages cannot be cut by them; empty: they are about to be.
        """

    def batch_starts(self, batch: Any) -> None:
        """A batch is about to be trained on."""

    def step(self) -> AbstractContextManager[None]:
        """Return a context for the user's training step."""
        return nullcontext()

    def weigh_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to run a backward of."""
        return loss

    def backward_is_over(self) -> None:
        """Autograd has run; gradients are still those of this replica."""

    def gradients_are_averaged(self) -> None:
        """Gradients are those of all replicas."""

    def fence(self) -> None:
        """Wait until no replica is ahead of another one."""

    def pause(self) -> None:
        """A validation begins."""

    def resume(self) -> None:
        """A validation is over."""

    def last_batch_is_over(self) -> None:
        """All batches are trained on, and signals that came meanwhile are not handled yet."""

    def training_ends(self) -> None:
        """The training is over."""

    def close(self) -> None:
        """Leave the Trainer and its optimizers as they were."""
