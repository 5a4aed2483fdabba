"""Gradients of one replica, from its backward passes to what the optimizers use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lightning_hybrid.comm import signals_deferred
from lightning_hybrid.comm.protocol import Reduce
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.ownership import Unsettled
from lightning_hybrid.driver.step_calls import StepCalls
from lightning_hybrid.driver.tied_weights import Borrowing
from lightning_hybrid.driver.weights import Replicated

T = TypeVar("T")


class ReplicaGradients:
    """Averages gradients over the replicas, once they are where they belong.

    Args:
        commands: to the workers.
        borrowing: brings those of tied parameters to their owners.
        replicated: what this rank averages itself.
        calls: of networks, in this step.
        unsettled: what is not final yet.

    Attributes:
        synchronize: whether to average; off while gradients accumulate.
    """

    def __init__(
        self,
        commands: Commands,
        borrowing: Borrowing,
        replicated: Replicated,
        calls: StepCalls,
        unsettled: Unsettled,
    ) -> None:
        self._commands, self._borrowing, self._replicated = commands, borrowing, replicated
        self._calls, self._unsettled = calls, unsettled
        self.synchronize = True

    def overlap(self) -> bool:
        """Whether the backward of the one call in this step may average gradients as it goes.

        With several calls the last of their backwards is not known in advance, and what a penalty
        on remote parameters adds comes later; then the gradients are averaged when
        `loss.backward()` is over. Counting calls, and not open ones, gives all replicas the same
        answer.
        """
        alone = not self._commands.remote.in_graph and not self._borrowing
        return self.synchronize and self._calls.count == 1 and alone

    def note(self, network: int, *, averaged: bool) -> None:
        """A backward has added to the gradients of the network of this number."""
        self._unsettled.note(network, averaged=averaged)

    @contextmanager
    def kept_local(self) -> Iterator[None]:
        """Inside, a backward pass leaves what each replica has found, and nothing to average."""
        # (torch.autograd.grad gives those of each replica under DDP, too)
        synchronize, networks = self.synchronize, set(self._unsettled.networks)
        self.synchronize = False
        self.settle()
        try:
            yield
        finally:
            self.synchronize = synchronize
            self._unsettled.networks = networks

    def alone(self, backward: Callable[[], T]) -> tuple[T, bool]:
        """Run a backward pass that averages nothing.

        Returns:
            What it returns, and whether it has added to gradients of a network.
        """
        self.settle()
        synchronize, networks = self.synchronize, set(self._unsettled.networks)
        self.synchronize = False
        self._unsettled.networks.clear()
        try:
            found = backward()
            self.settle()
            return found, bool(self._unsettled.networks)
        finally:
            self.synchronize = synchronize
            self._unsettled.networks |= networks

    def before_backward(self) -> None:
        """`loss.backward()` comes. Without stages its gradients are final as they come."""
        if self.synchronize and not self._commands.workers.ranks:
            self._replicated.rest.arm()

    def settle(self) -> None:
        """Have the gradients where they belong: those of penalties and of tied parameters."""
        self._commands.remote.flush()
        self._borrowing.settle()

    @signals_deferred
    def after_backward(self) -> None:
        """Average over the replicas what the backward passes have not averaged on their way."""
        self.settle()
        if not self.synchronize:
            return
        # averaging is collective: in other orders the ranks of a group would average other things
        for network in sorted(self._unsettled.networks):
            self._commands.tell(Reduce(network))
            self._replicated.networks[network].reduce()
        self._unsettled.networks.clear()
        if self._commands.workers.ranks:
            self._replicated.rest.arm()
        self._replicated.rest.finish()
