"""Which worker owns which tensor, and how the driver reads and changes it there.

Between a backward pass and the averaging over replicas gradients are not final; which ones is noted
here too.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor
from torch.nn import Parameter

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import protocol, signals_deferred
from lightning_hybrid.comm.protocol import Command
from lightning_hybrid.driver.commands import Workers
from lightning_hybrid.driver.loans import Loans
from lightning_hybrid.remote import Kind


class Unsettled:
    """What backward passes, and penalties on remote parameters, have added to.

    Attributes:
        networks: numbers of the networks whose gradients are not averaged over the replicas yet.
        borrowed: whether borrowers may have gradients that the owners of tied parameters lack.
    """

    def __init__(self) -> None:
        self.networks: set[int] = set()
        self.borrowed = False

    def note(self, network: int, *, averaged: bool) -> None:
        """Note that a backward pass has added to the gradients of a network.

        Args:
            network: its number.
            averaged: the pass itself averages them.
        """
        self.borrowed = True
        if not averaged:
            self.networks.add(network)


class Ownership:
    """The tensors of the workers of one replica.

    It is what :class:`~lightning_hybrid.remote.remote.RemoteTensors` asks, and so sends its
    commands without bringing the changes of remote tensors before: that one does it.

    Args:
        workers: of this replica.
        unsettled: is told of networks whose gradients are added to.

    Attributes:
        any_network: whether a network has been cut. Before, workers have neither stages nor
            optimizers.
        loans: what workers lend the driver.
        network_of: of each tensor, by its name in the LightningModule, the number of its network.
    """

    def __init__(self, workers: Workers, unsettled: Unsettled) -> None:
        self._workers, self._unsettled = workers, unsettled
        self.any_network = False
        self.loans = Loans(workers)
        self.network_of: dict[str, int] = {}
        self._owner: dict[str, int] = {}
        # further workers with the same: copies of a stage, or users of a constant buffer
        self._sharers: dict[str, list[int]] = {}
        self._tensors: dict[int, list[str]] = {rank: [] for rank in workers.ranks}
        self._copied: dict[str, Parameter] = {}

    def add(
        self,
        network: int,
        names: Mapping[int, Sequence[str]],
        copied: Mapping[str, Parameter] = MappingProxyType({}),
    ) -> None:
        """Register a network that was cut: workers own some of its tensors from here on.

        Args:
            network: its number.
            names: by ``pp_rank`` of each worker, names in the LightningModule of what it owns.
            copied: those parameters of them that the driver has a copy of: until gradients are
                summed it has a part of theirs.
        """
        self.any_network = True
        self._copied.update(copied)
        for rank, owned in names.items():
            for name in owned:
                if self._owner.setdefault(name, rank) != rank:
                    self._sharers.setdefault(name, []).append(rank)
            self.network_of |= dict.fromkeys(owned, network)
            self._tensors[rank] += owned

    def tensors_of(self, rank: int) -> list[str]:
        """Names of the parameters and buffers that a worker owns."""
        return self._tensors[rank]

    def rank_of(self, name: str) -> int:
        """``pp_rank`` of the worker that owns a parameter or buffer; of copies the first."""
        return self._owner[name]

    # ------------------------------------------------------------------ for remote tensors

    @signals_deferred
    def give(self, kind: Kind, names: list[str]) -> dict[str, Tensor]:
        """Remote tensors as they are now; of gradients that copies have parts of, their sums."""
        command = protocol.GiveGradients if kind is Kind.GRADIENT else protocol.GiveWeights
        parts = [name for name in names if kind is Kind.GRADIENT and self._in_parts(name)]
        requests: dict[int, Command] = {
            rank: command(mine) for rank, mine in self._by_worker(names, parts).items()
        }
        # all are asked before one is heard: they copy from their devices at the same time
        for rank, request in requests.items():
            self._workers.send(rank, request)
        found: dict[str, Tensor] = {}
        for answer in self._workers.hear(requests):
            for name, value in answer.tensors:
                found[name] = found[name] + value if name in found else value
        for name, part in self._parts_here(names).items() if kind is Kind.GRADIENT else ():
            found[name] = found[name] + part.to(found[name].device) if name in found else part
        return found

    def take(self, kind: Kind, values: Mapping[str, Tensor], *, add: bool = False) -> None:
        """Set remote tensors, or add to them."""
        gradients = kind is Kind.GRADIENT
        # what was added on one replica alone is not averaged yet
        if add:
            for name in values:
                self._unsettled.note(self.network_of[name], averaged=False)
            values = self.loans.give_back(values)
        parts = [name for name in values if gradients and (add or self._in_parts(name))]
        # a sum of what several have: set on one of them, the others must have nothing
        if parts and not add:  # the first copy's stands for all
            self.clear_gradients(parts)
        receivers = self._by_worker(values, [name for name in values if name not in parts])
        for rank, names in receivers.items():
            mine = {name: values[name] for name in names}
            if gradients:
                self._workers.send(rank, protocol.TakeGradients(add, mine.items()))
            else:
                self._workers.send(rank, protocol.TakeWeights(mine.items()))

    def clear_gradients(self, names: list[str]) -> None:
        """Of remote parameters."""
        self._clear_here(self._parts_here(names))
        for rank, mine in self._by_worker(names, names).items():
            self._workers.send(rank, protocol.ClearGradients(mine))

    @signals_deferred
    def gradient_names(self) -> set[str]:
        """Of remote parameters that have a gradient."""
        for rank in self._workers.ranks:
            self._workers.send(rank, protocol.NameGradients())
        answers = self._workers.hear(self._workers.ranks)
        there = {name for answer in answers for name in answer.value}
        return there | self._parts_here(self._copied).keys()

    def settle(self) -> None:
        """A step, or the end of the run, finds gradients with their owners alone."""
        parts = self._parts_here(self._copied)
        if parts:
            self._clear_here(parts)
            self.take(Kind.GRADIENT, parts, add=True)

    def _clear_here(self, names: Iterable[str]) -> None:
        with as_they_are():
            for name in names:
                self._copied[name].grad = None

    def _parts_here(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What the driver's copy of a stage has of gradients that are not summed yet."""
        with as_they_are():
            found = {name: self._copied[name].grad for name in names if name in self._copied}
        return {name: part for name, part in found.items() if part is not None}

    def _in_parts(self, name: str) -> bool:
        """Whether the gradient of a parameter is the sum of what its owners have."""
        return self.network_of[name] in self._unsettled.networks

    def _by_worker(self, names: Iterable[str], of_all: Iterable[str]) -> dict[int, list[str]]:
        """By owner; those ``of_all`` by each that shares them."""
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self._owner[name], []).append(name)
        for name in of_all:
            for rank in self._sharers.get(name, ()):
                found.setdefault(rank, []).append(name)
        return found
