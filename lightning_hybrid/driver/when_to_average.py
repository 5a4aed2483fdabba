"""Decides when the gradients of a replica are averaged over the replicas."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, isfinite

from torch import Tensor

from lightning_hybrid.comm import Group, Survivors, agree, signals_deferred
from lightning_hybrid.comm.protocol import AwaitSums, Reduce, SumAgain, TakeAverages
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.tied_weights import Borrowing
from lightning_hybrid.driver.weights import Replicated


class ReplicaGradients:
    """Averages gradients over the replicas, once the owners of parameters have all parts of them.

    Args:
        commands: sends commands to the workers.
        borrowing: brings gradients of tied parameters to their owners.
        replicated: the data-parallel groups of what this rank owns.
        unaveraged: see the attribute; other parts of the driver add to the same set.
        survivors: the replicas that go on if one is lost.
        drivers: the gloo group of the drivers of all replicas; ``None``: there is one.

    Attributes:
        unaveraged: numbers of the networks whose gradients were added to and are not averaged yet.
        synchronize: whether to average; False while gradients accumulate.
    """

    def __init__(
        self,
        commands: Commands,
        borrowing: Borrowing,
        replicated: Replicated,
        unaveraged: set[int],
        survivors: Survivors | None = None,
        drivers: Group = None,
    ) -> None:
        self._commands = commands
        self._borrowing = borrowing
        self._replicated = replicated
        self.unaveraged = unaveraged
        self._survivors = survivors
        self._drivers = drivers
        self.synchronize = True

    def overlap(self, calls: int) -> bool:
        """Whether a backward may average gradients while it runs, overlapped with computation.

        That is so if the step has made a single call of a network. With several calls it is not
        known which backward is the last; and gradients of penalties on workers' parameters, and of
        tied weights, come later. In these cases gradients are averaged when `loss.backward()` is
        over. All replicas get the same answer.

        Args:
            calls: how many calls of networks the step has made.
        """
        alone = not self._commands.remote.in_graph and not self._borrowing
        return self.synchronize and calls == 1 and alone

    def begin_inside(self, network: int, calls: int) -> bool:
        """Whether a call with backwards inside of it may average their gradients at once.

        All replicas get the same answer. Whether the averages may be used is known only in the
        user's backward: see :meth:`take_inside`.

        Args:
            network: number of the network.
            calls: how many calls of networks the step has made before.
        """
        if self._drivers is None or self._drivers.size() == 1:
            return False
        return self.overlap(calls + 1) and network not in self.unaveraged

    def take_inside(self, factor: Tensor | None) -> bool:
        """Whether averages that were begun in a call (:meth:`begin_inside`) may be used.

        That is so if all replicas have the same factor. Collective over the drivers. This rank
        waits here until its device has computed the factor.

        Args:
            factor: by what this replica multiplies the gradients that the call has left aside;
                ``None``: this replica cannot use the averages.
        """
        number = inf if factor is None else float(factor)
        return agree(self._drivers, number if isfinite(number) else None)

    @contextmanager
    def kept_local(self) -> Iterator[None]:
        """Inside, gradients of a backward pass are not averaged: each replica keeps its own.

        It is for `torch.autograd.grad`, which averages none under DDP either.
        """
        synchronize, self.synchronize = self.synchronize, False
        self.bring_to_owners()
        networks = set(self.unaveraged)
        try:
            yield
        finally:
            self.synchronize = synchronize
            self.unaveraged.clear()
            self.unaveraged.update(networks)

    def before_backward(self) -> None:
        """Prepare for `loss.backward()`: without workers, averaging overlaps with the backward.

        Nothing is done in a replica that has workers, or while :attr:`synchronize` is False.
        """
        if self.synchronize and not self._commands.workers.ranks:
            self._replicated.rest.arm()

    def bring_to_owners(self) -> None:
        """Send gradients that arose on other ranks than the owners of the parameters to the owners.

        These are gradients of penalties, computed here, and those of tied parameters.
        """
        self._commands.remote.flush()
        self._borrowing.add_borrowed_gradients()

    @signals_deferred
    def after_backward(self) -> None:
        """Average the gradients that the backward passes have not averaged while they ran.

        Called after each `loss.backward()`. Collective over all ranks of all replicas; it averages
        nothing while :attr:`synchronize` is False.
        """
        self.bring_to_owners()
        if not self.synchronize:
            return
        # (in a fixed order: averaging is collective over the ranks of a group)
        for network in sorted(self.unaveraged):
            self._commands.tell(Reduce(network))
            self._replicated.networks[network].reduce()
        self.unaveraged.clear()
        if self._commands.workers.ranks:
            self._replicated.rest.arm()
        self._replicated.rest.finish()
        if self._survivors is not None:
            self._take_together(self._survivors)

    def _take_together(self, survivors: Survivors) -> None:
        """Set the averaged gradients, once all ranks of all replicas that are left have their sums.

        If a replica is lost meanwhile, the others sum again without it.

        Args:
            survivors: the replicas that are left.
        """
        groups, ask = [*self._replicated.networks, self._replicated.rest], self._commands.ask
        while True:
            survivors.begin_total()
            sums = [group.is_complete() for group in groups] + [survivors.has_total()]
            sums += [answer.holds for answer in ask(AwaitSums())]
            living = survivors.agree(complete=all(sums))
            if living is None:
                break
            self._commands.tell(SumAgain(living))
            survivors.go_on_with(living)
            for group in groups:
                group.sum_again()
        self._commands.tell(TakeAverages(survivors.scale))
        for group in groups:
            group.take(survivors.scale)
