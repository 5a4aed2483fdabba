"""Parameters that stages of several ranks use (tied weights), on the driver.

The rank of the earliest stage owns them (never the driver, if a worker uses them too); the others
borrow. Before a forward the borrowers have the owner's values, and after a backward the owner has
the borrowers' gradients. What the driver's own stages borrow are windows
(:mod:`lightning_hybrid.runtime.remote`) and needs no bringing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from lightning_hybrid.comm.protocol import Kind
from lightning_hybrid.runtime.remote import RemoteTensors


class Lender(Protocol):
    """What it takes of the driver."""

    remote: RemoteTensors

    def give(self, kind: Kind, names: list[str]) -> Mapping[str, Tensor]: ...
    def take(self, kind: Kind, values: Mapping[str, Tensor], *, add: bool = False) -> None: ...


class Borrowing:
    """What the ranks of one replica borrow of each other.

    Args:
        lender: the driver.
        hand_out: gives tensors to a worker that borrows them.
        collect: takes the gradients that borrowing workers have, and clears them there.
    """

    def __init__(
        self,
        lender: Lender,
        hand_out: Callable[[int, Mapping[str, Tensor]], None],
        collect: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._lender, self._hand_out, self._collect = lender, hand_out, collect
        self._here: list[str] = []
        self._workers: dict[int, list[str]] = {}
        self._current: object = None
        self._gradients = False

    def __bool__(self) -> bool:
        return bool(self._here or self._workers)

    def add(self, names: Sequence[Sequence[str]]) -> None:
        """Names in the LightningModule, per rank of the replica; the first is the driver."""
        here, *workers = names
        self._here += here
        for worker, borrowed in enumerate(workers, start=1):
            if borrowed:
                self._workers.setdefault(worker, []).extend(borrowed)

    def refresh(self, *, grad: bool) -> None:
        """A forward follows: the borrowers need the owners' values.

        Args:
            grad: it is differentiable, so that gradients will arise here.
        """
        if not self:
            return
        remote = self._lender.remote
        if grad:
            remote.note_use(self._here)
        remote.flush()
        if remote.state(Kind.PARAMETER) == self._current:
            return
        remote.read_all(self._here)
        for worker, names in self._workers.items():
            self._hand_out(worker, self._lender.give(Kind.PARAMETER, names))
        self._current = remote.state(Kind.PARAMETER)

    def note_backward(self) -> None:
        """A backward has added to gradients."""
        self._gradients = True

    def settle(self) -> None:
        """Gradients are about to be used: the owners need those of the borrowers."""
        if self._workers and self._gradients:
            self._lender.take(Kind.GRADIENT, self._collect(), add=True)
            self._lender.remote.outdate(Kind.GRADIENT)
        self._gradients = False
