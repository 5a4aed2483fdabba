"""Which worker owns which tensor, and how the driver reads and changes it there."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import protocol, signals_deferred
from lightning_hybrid.comm.protocol import Command, LendTensors, TakeLentGradients
from lightning_hybrid.driver.commands import Workers
from lightning_hybrid.remote import RemoteKind


class Ownership:
    """Knows which worker of a replica owns which tensor, and reads and sets tensors there.

    :class:`~lightning_hybrid.remote.proxies.Proxies` uses it to fetch and send, so it sends
    commands directly to the workers, without flushing the proxies first as `Commands` does.

    Args:
        workers: the channels to the workers of this replica.
        unaveraged: numbers of the networks whose gradients were added to and are not averaged over
            the replicas yet; this adds to them.

    Attributes:
        any_network: whether a network has been cut. Before that, workers have neither stages nor
            optimizers.
        lent: by name, the weights that workers own and stages of this rank use too. They are sent
            in each step, from device to device (:mod:`lightning_hybrid.stage.lending_line`).
        network_of: by name of the tensor in the LightningModule, the number of its network.
    """

    def __init__(self, workers: Workers, unaveraged: set[int]) -> None:
        self._workers = workers
        self._unaveraged = unaveraged
        self.any_network = False
        self.lent: dict[str, Tensor] = {}
        # by worker, their names, and their types at first, which the worker's still have
        self._lenders: dict[int, tuple[list[str], list[torch.dtype]]] = {}
        self.network_of: dict[str, int] = {}
        self._owner: dict[str, int] = {}
        # further workers that have the tensor: by copies of a stage, or a constant buffer in two
        self._sharers: dict[str, list[int]] = {}
        self._tensors: dict[int, list[str]] = {rank: [] for rank in workers.ranks}
        self._copied: dict[str, Parameter] = {}
        self._sparse: set[str] = set()  # of the parameters that have a gradient

    def add(
        self,
        network: int,
        names: Mapping[int, Sequence[str]],
        copied: Mapping[str, Parameter] = MappingProxyType({}),
    ) -> None:
        """Register the tensors that workers own of a network that was cut.

        Args:
            network: number of the network.
            names: by ``pp_rank`` of each worker, names in the LightningModule of what it owns.
            copied: by name, the parameters of the driver's copy of a stage of workers. Their
                gradients are to be added to the workers'.
        """
        self.any_network = True
        self._copied.update(copied)
        for rank, owned in names.items():
            for name in owned:
                if self._owner.setdefault(name, rank) != rank:
                    self._sharers.setdefault(name, []).append(rank)
            self.network_of |= dict.fromkeys(owned, network)
            self._tensors[rank] += owned

    def lend(self, rank: int, weights: Mapping[str, Tensor]) -> None:
        """Register weights that a worker owns and lends to stages of this rank, which use them too.

        Args:
            rank: ``pp_rank`` of the worker.
            weights: the parameters of this rank's LightningModule, by name.
        """
        if weights:
            names, types = self._lenders.setdefault(rank, ([], []))
            names += weights
            types += [weight.dtype for weight in weights.values()]
            self.lent |= weights

    def bring_lent(self) -> Collection[str]:
        """Fetch the present values of all lent weights, and write them into their memory here.

        (The version counters of the weights here are not raised, since values are possibly the same
        as before.)

        Returns:
            The names of the lent weights.
        """
        with as_they_are():
            memory = {name: weight.data for name, weight in self.lent.items()}
        return self.bring(RemoteKind.PARAMETER, memory)

    def tensors_of(self, rank: int) -> list[str]:
        """Names of the parameters and buffers that a worker owns."""
        return self._tensors[rank]

    def rank_of(self, name: str) -> int:
        """``pp_rank`` of the rank that owns a parameter or buffer; of copies, that of the first.

        It is 0, the driver's, if no worker owns it.
        """
        return self._owner.get(name, 0)

    # ------------------------------------------------------------------ for remote tensors

    @signals_deferred
    def give(self, kind: RemoteKind, names: list[str]) -> dict[str, Tensor]:
        """Fetch tensors from the workers that own them.

        If copies of a stage have parts of a gradient, their sum is given.

        Args:
            kind: the kind of the tensors.
            names: their names in the LightningModule.

        Returns:
            The tensors by name.
        """
        command = protocol.GiveGradients if kind is RemoteKind.GRADIENT else protocol.GiveWeights
        parts = [name for name in names if kind is RemoteKind.GRADIENT and self._in_parts(name)]
        requests: dict[int, Command] = {
            rank: command(mine) for rank, mine in self._by_worker(names, parts).items()
        }
        # (all are asked before the first answer, so that they copy from their devices in parallel)
        for rank, request in requests.items():
            self._workers.send(rank, request)
        found: dict[str, Tensor] = {}
        for answer in self._workers.hear(requests):
            for name, value in answer.tensors:
                found[name] = found[name] + value if name in found else value
        for name, part in self._parts_here(names).items() if kind is RemoteKind.GRADIENT else ():
            found[name] = found[name] + part.to(found[name].device) if name in found else part
        return found

    @signals_deferred
    def bring(self, kind: RemoteKind, memory: Mapping[str, Tensor]) -> Collection[str]:
        """Write parameters, or their gradients, as they are now into memory on this device.

        Args:
            kind: parameters or gradients; not buffers, whose sizes may change.
            memory: by name, tensors on this device with the sizes that the owners have; they are
                written to.

        Returns:
            The names of the tensors that were written. Use :meth:`give` for the others: gradients
            that are sparse, or of which several ranks have a part.
        """
        names = list(memory)
        if kind is RemoteKind.GRADIENT:
            names = [n for n in names if n not in self._sparse and not self._in_parts(n)]
        owners = self._by_worker(names, ())
        orders = dict[int, Command]()
        for rank, mine in owners.items():
            types = [memory[name].dtype for name in mine]
            # (those that are lent in each step without names and types, and so without a pickle)
            usual = kind is RemoteKind.PARAMETER and self._lenders.get(rank) == (mine, types)
            orders[rank] = (
                LendTensors() if usual else LendTensors(mine, kind is RemoteKind.GRADIENT, types)
            )
        with self._workers.joined():
            for rank, order in orders.items():
                self._workers.send(rank, order)
            for rank, mine in owners.items():
                self._workers.lines[rank].to_driver([memory[name] for name in mine])
        return names

    def take(self, kind: RemoteKind, values: Mapping[str, Tensor], *, add: bool = False) -> None:
        """Set tensors at the workers that own them, or add to gradients there.

        Args:
            kind: the kind of the tensors.
            values: the values by name in the LightningModule.
            add: whether the values, which are gradients then, are added; their networks are noted
                as not averaged.
        """
        gradients = kind is RemoteKind.GRADIENT
        if add:  # (this replica alone has added, so it has to be averaged)
            for name in values:
                self._unaveraged.add(self.network_of[name])
            values = self._give_back(values)
        parts = [name for name in values if gradients and (add or self._in_parts(name))]
        # copies of a stage have parts of these gradients: set it on the first, clear the others
        if parts and not add:
            self.clear_gradients(parts)
        receivers = self._by_worker(values, [name for name in values if name not in parts])
        for rank, names in receivers.items():
            mine = {name: values[name] for name in names}
            if gradients:
                self._workers.send(rank, protocol.TakeGradients(add, mine.items()))
            else:
                self._workers.send(rank, protocol.TakeWeights(mine.items()))

    @signals_deferred
    def _give_back(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add gradients of lent weights to the owners', from device to device.

        Args:
            gradients: gradients by name of the parameter.

        Returns:
            The gradients that were not sent: those of parameters that are not lent, and all those
            of a worker if one of the weights that it lends has no gradient here, or a sparse one.
        """
        rest = dict(gradients)
        for rank, (names, types) in self._lenders.items():
            found = [rest[name] for name in names if name in rest]
            if len(found) < len(names) or any(g.layout is not torch.strided for g in found):
                continue
            self._workers.send(rank, TakeLentGradients())
            with as_they_are(), self._workers.joined():
                # (those that another worker has sent are on the CPU)
                device = self.lent[names[0]].device
                sent = [gradient.to(device, kind) for gradient, kind in zip(found, types)]
                self._workers.lines[rank].to_owner(sent)
            for name in names:
                del rest[name]
        return rest

    def clear_gradients(self, names: list[str]) -> None:
        """Set the gradients of these parameters to None, here and on all workers that have a part.

        Args:
            names: names in the LightningModule.
        """
        self._clear_here(self._parts_here(names))
        for rank, mine in self._by_worker(names, names).items():
            self._workers.send(rank, protocol.ClearGradients(mine))

    @signals_deferred
    def gradient_names(self) -> set[str]:
        """Return the names of the workers' parameters that have a gradient.

        It may be on a worker, or in part in the driver's copy of a stage. Asks all workers, and
        notes which of their gradients are sparse (:meth:`take` leaves those out).
        """
        for rank in self._workers.ranks:
            self._workers.send(rank, protocol.NameGradients())
        answers = self._workers.hear(self._workers.ranks)
        dense = {name: is_dense for answer in answers for name, is_dense in answer.value.items()}
        self._sparse = {name for name, is_dense in dense.items() if not is_dense}
        return dense.keys() | self._parts_here(self._copied).keys()

    def add_copied_gradients(self) -> None:
        """Add the gradients of the driver's copy of a stage to the owners', and clear them here.

        It is called before gradients are used.
        """
        parts = self._parts_here(self._copied)
        if parts:
            self._clear_here(parts)
            self.take(RemoteKind.GRADIENT, parts, add=True)

    def _clear_here(self, names: Iterable[str]) -> None:
        with as_they_are():
            for name in names:
                self._copied[name].grad = None

    def _parts_here(self, names: Iterable[str]) -> dict[str, Tensor]:
        """By name, the gradients that parameters of the driver's copy of a stage have now.

        They are parts: the owners do not have them yet.

        Args:
            names: the parameters that are looked at; names that the copy lacks are left out.
        """
        with as_they_are():
            found = {name: self._copied[name].grad for name in names if name in self._copied}
        return {name: part for name, part in found.items() if part is not None}

    def _in_parts(self, name: str) -> bool:
        """Whether copies of a stage possibly have parts of a parameter's gradient, not summed yet.

        It is True as long as the gradients of the parameter's network are not averaged.
        """
        return self.network_of[name] in self._unaveraged

    def _by_worker(self, names: Iterable[str], of_all: Iterable[str]) -> dict[int, list[str]]:
        """Sort names of tensors by ``pp_rank`` of the workers that have them.

        Args:
            names: names that go to the owner alone.
            of_all: names that also go to all other workers that have the tensor.
        """
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self._owner[name], []).append(name)
        for name in of_all:
            for rank in self._sharers.get(name, ()):
                found.setdefault(rank, []).append(name)
        return found
