"""The hooks of a run for its parts, each of which does what only some users have asked for."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.driver import Driver
from lightning_hybrid.planning import Plan


class Part:
    """Base class of the parts of a run on a driver; subclasses override the hooks that they need.

    The hooks do nothing by default. A :class:`DriverSession` calls each hook of all its parts, in
    the order of its list. In one run:

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
        agrees_to_end: whether the part has replicas tell each other, while they average gradients,
            that one was told to end (SIGTERM). Then all drivers run handlers of signals before a
            batch, and none does so after a backward.
    """

    agrees_to_end = False

    def begin(self, driver: Driver) -> None:
        """Prepare for a driver: at the beginning of the run, and after stages were cut anew.

        Args:
            driver: the driver of the stages from now on.
        """

    def begin_training(self, optimizers: Sequence[Optimizer]) -> None:
        """Prepare for training, when the optimizers have been made to step on all ranks.

        Args:
            optimizers: the user's optimizers.

        Raises:
            PlanError: the part does not go together with them, or with the Trainer's options.
        """

    def train_loader(self, loader: Any) -> Any:
        """Return the data loader that a Trainer which trains is to use in place of its own.

        It may be one for validation.

        Args:
            loader: the Trainer's own.
        """
        return loader

    def move_batch(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Return a training batch on the device of this driver.

        Args:
            batch: the batch as the loader gave it.
            move: function that returns a batch on the device.
        """
        return move(batch)

    def new_plans(self) -> Mapping[str, Plan]:
        """Return plans by which stages are cut anew before this batch, by name of the network.

        Empty: stages stay as they are. All drivers must return equal plans.
        """
        return {}

    def cuts_decided(self, plans: Mapping[str, Plan], reason: str) -> None:
        """Take note of new plans that a part has returned, and of whether they will be used.

        Args:
            plans: the new plans, by name of the network.
            reason: why stages cannot be cut by these plans; empty: they are about to be cut.
        """

    def batch_starts(self, batch: Any) -> None:
        """Prepare for a batch, which is about to be trained on.

        Args:
            batch: the batch, on the device of this driver.
        """

    def step(self) -> AbstractContextManager[None]:
        """Return a context in which the user's ``training_step`` runs."""
        return nullcontext()

    def weigh_loss(self, loss: Tensor) -> Tensor:
        """Return the loss from which the backward is to run, such as a scaled one.

        Args:
            loss: the loss, as the parts before this one have returned it.
        """
        return loss

    def backward_is_over(self) -> None:
        """Act after a backward, while gradients are still those of this replica alone."""

    def gradients_are_averaged(self) -> None:
        """Act when gradients have been averaged over the replicas after a backward."""

    def fence(self) -> None:
        """Wait until no replica is ahead of another one, before they do something together."""

    def pause(self) -> None:
        """Pause what the part does between training batches, since a validation begins."""

    def resume(self) -> None:
        """Go on as before :meth:`pause`, since a validation is over."""

    def last_batch_is_over(self) -> None:
        """Act after the last training batch, before signals that came meanwhile are handled."""

    def training_ends(self) -> None:
        """Act at the end of the training, when signals have been handled."""

    def close(self) -> None:
        """Undo, at the end of the run, what the part has changed in the Trainer and optimizers."""
