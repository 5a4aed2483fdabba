"""Keeps tied weights, parameters that stages of several ranks use, equal on these ranks.

The rank of the earliest stage owns them (never the driver, if a worker uses them too); the others
borrow. Before a forward the borrowers get the owner's values, and after a backward the owner gets
the borrowers' gradients. What the driver's own stages borrow are proxies
(:mod:`lightning_hybrid.remote.proxies`), whose values and gradients are sent from device to device
(:mod:`lightning_hybrid.driver.ownership`); what workers borrow of each other is sent through the
driver.

The driver may also have a copy of a whole stage of workers. The first of these lends it the weights
in the same way; its gradients are summed with those of all copies
(:mod:`lightning_hybrid.stage.gradient_averaging`).
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_hybrid.comm import signals_deferred
from lightning_hybrid.comm.protocol import GiveGradients, TakeWeights
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.ownership import Ownership
from lightning_hybrid.remote import RemoteKind


class Borrowing:
    """Brings borrowers of tied weights the owners' values, and owners the borrowers' gradients.

    Args:
        commands: sends commands to the workers.
        ownership: which worker owns which tensor.
        unaveraged: numbers of the networks whose gradients are not averaged over the replicas yet:
            borrowers may have some that the owners lack.

    Attributes:
        active: whether a rank uses a weight that another one owns (it is tied, or the driver has a
            copy of a worker's stage), so that :meth:`refresh` must be called before each forward.
    """

    def __init__(self, commands: Commands, ownership: Ownership, unaveraged: set[int]) -> None:
        self._commands = commands
        self._ownership = ownership
        self._unaveraged = unaveraged
        self.active = False
        self._here: list[str] = []
        self._workers: dict[int, list[str]] = {}
        self._current: object = None

    def __bool__(self) -> bool:
        """Whether any rank borrows a tied weight; weights of copied stages do not count here."""
        return bool(self._here or self._workers)

    def add(self, names: Sequence[Sequence[str]]) -> None:
        """Register the tied weights that the ranks borrow.

        Args:
            names: for each rank of the replica, in the order of ``pp_rank``, the names in the
                LightningModule of the weights that it borrows.
        """
        here, *workers = names
        self._here += here
        for worker, borrowed in enumerate(workers, start=1):
            if borrowed:
                self._workers.setdefault(worker, []).extend(borrowed)
        self.active = bool(self._ownership.lent or self._workers)

    def refresh(self, *, grad: bool) -> None:
        """Send borrowers the owners' values before a forward, unless they have them already.

        Args:
            grad: whether the forward is differentiable, so that the driver may get gradients.
        """
        remote = self._commands.remote
        if grad:
            remote.note_use(self._here)
        remote.flush()
        if remote.state(RemoteKind.PARAMETER) == self._current:
            return
        for worker, names in self._workers.items():
            values = self._ownership.give(RemoteKind.PARAMETER, names)
            self._commands.workers.send(worker, TakeWeights(values.items()))
        remote.adopt(self._ownership.bring_lent())
        self._current = remote.state(RemoteKind.PARAMETER)

    def add_borrowed_gradients(self) -> None:
        """Take the gradients of tied weights from borrowing workers, and add them to the owners'.

        It is called before gradients are used. (The driver's own are sent with the proxies'.)
        """
        if self._workers and self._unaveraged:
            self._ownership.take(RemoteKind.GRADIENT, self._collect(), add=True)
            self._commands.remote.outdate(RemoteKind.GRADIENT)

    @signals_deferred
    def _collect(self) -> Mapping[str, Tensor]:
        """Take the gradients of tied weights off the borrowing workers.

        Returns:
            By name in the LightningModule, the sum of their gradients.
        """
        found: dict[str, Tensor] = {}
        questions = {rank: GiveGradients(names, take=True) for rank, names in self._workers.items()}
        self._commands.tell_each(questions)
        for answer in self._commands.workers.hear(questions):
            for name, value in answer.tensors:
                found[name] = found[name] + value if name in found else value
        return found
