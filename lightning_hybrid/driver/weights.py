"""The weights of all stages of one replica are brought to the driver, and from it to the workers.

Workers write what they own to files (:mod:`lightning_hybrid.state.tensor_file`), which the driver
maps. Where it cannot open them, as from another host, the tensors are sent, and it writes a file.
:class:`Replicated` has the data-parallel groups by which a driver's own stages, and what no network
owns, are kept equal on all replicas.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_hybrid._torch.modules import tables
from lightning_hybrid._torch.tensors import as_they_are, version
from lightning_hybrid.comm import Coordinates, Group, Survivors, TensorSpec, signals_deferred
from lightning_hybrid.comm.protocol import (
    GiveTensor,
    SynchronizeBuffers,
    TakeWeights,
    WriteStates,
    WriteTensors,
)
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.ownership import Ownership
from lightning_hybrid.errors import DeferredError, HybridError
from lightning_hybrid.remote import (
    RemoteKind,
    is_deferred,
    is_lent,
    is_unread,
    materialize,
    refuse_lost,
    take_back,
)
from lightning_hybrid.stage import AveragingGroup, state_buffers, tensors_of
from lightning_hybrid.state import (
    TensorAddress,
    having_all,
    leave_to_worker,
    put_mapped,
    read_files,
    received,
    to_send,
    unread_there,
)


class FilesOfWorkers:
    """Reads what workers own: from files that they write, or tensor by tensor.

    Args:
        commands: sends commands to the workers.
        folder: where files are written, if possible.
        here: the coordinates of this rank.

    Attributes:
        folder: see above.
    """

    def __init__(self, commands: Commands, folder: str, here: Coordinates) -> None:
        self.folder = folder
        self._opens = True  # whether this rank can open files of the workers
        self._commands = commands
        self._here = here

    def tensors(self, *, at_end: bool = False, but: frozenset[str] = frozenset()) -> list[Any]:
        """Have each worker write the tensors that it owns to a file, and map the files.

        Args:
            at_end: whether the run ends, so that gradients are written too.
            but: names in the LightningModule of tensors that are left out.

        Returns:
            For each worker, in the order of ``pp_rank``, a dictionary with its tensors by name,
            under ``"weights"`` (buffers included) and ``"gradients"``.

        Raises:
            NoRoom: there is no room for a file.
        """
        return self._ask(WriteTensors(self.folder, at_end, but))

    def states(self, index: int) -> dict[str, dict[str, Any]]:
        """Have each worker write its states of an optimizer to a file, and map the files.

        Args:
            index: number of the optimizer.

        Returns:
            By name of the parameter, its state by key.

        Raises:
            NoRoom: there is no room for a file.
        """
        found = self._ask(WriteStates(index, self.folder))
        return {name: state for file in found for name, state in file.items()}

    def unread(self, owned: TensorAddress, spec: TensorSpec) -> Tensor:
        """Make a tensor that stands for one of a worker's, and fetches it when it is read.

        A read is an error if parameters have changed since, as by a step; or if the tensor is on
        another replica, where its rank can only write it to a sharded checkpoint.

        Args:
            owned: the rank and name of the worker's tensor.
            spec: its shape, type and strides.
        """
        remote = self._commands.remote
        before = remote.state(RemoteKind.PARAMETER)  # a step changes parameters and states

        def read() -> Tensor:
            replica, rank = divmod(owned.rank, self._here.ranks_per_replica)
            if replica != self._here.dp_rank:
                raise HybridError(
                    f"The state {owned.state!r} of {owned.name!r} is on replica {replica}, "
                    "which writes it to this checkpoint by itself (checkpoint=Sharded() and "
                    "shard_states=True). Leave it as it is, or use checkpoint='full'."
                )
            if remote.state(RemoteKind.PARAMETER) != before:
                name = f"{owned.state} of {owned.name}" if owned.state else owned.name
                raise DeferredError(
                    f"{name!r} of an earlier state dict was not read before the next step, and its "
                    "rank has newer numbers now. Copy what you keep: "
                    "{k: v.clone() for k, v in state_dict.items()}."
                )
            return self._give(rank, owned)

        return unread_there(spec, owned, read)

    @signals_deferred
    def _give(self, rank: int, owned: TensorAddress) -> Tensor:
        self._commands.workers.send(rank, GiveTensor(owned))
        [answer] = self._commands.workers.hear([rank])
        [(_, tensor)] = answer.tensors
        return tensor

    @signals_deferred
    def _ask(self, command: WriteTensors | WriteStates) -> list[Any]:
        if self._opens:
            answers = [answer.value for answer in self._commands.ask(command)]
            files = None if None in answers else read_files(answers)
            if files is not None:
                return files
            # (a rank on another host cannot open later files either)
            self._opens = False
        return [self._sent(rank, command) for rank in self._commands.workers.ranks]

    def _sent(self, rank: int, command: WriteTensors | WriteStates) -> Any:
        """Have a worker send what it would write to a file, and write and map the file here.

        Args:
            rank: ``pp_rank`` of the worker.
            command: the command to write the file.

        Returns:
            What the file has, as :meth:`tensors` and :meth:`states` describe it for one worker.
        """
        self._commands.tell_each({rank: replace(command, folder=None)})
        [answer] = self._commands.workers.hear([rank])
        return received(answer, self.folder)


class Replicated:
    """The data-parallel groups of all that one driver owns, to average gradients and sync buffers.

    Args:
        module: the LightningModule.
        start: its outline, with the submodules that it had at the start; workers know tensors by
            their names in it.
        group: the process group of the drivers of all replicas.
        device: the driver's device.
        survivors: the replicas that go on if one is lost.

    Attributes:
        networks: by number of the network, the group of this rank's stages of it.
        rest: the group of tensors that no network owns: temperatures, loss weights, small networks.
        here: whether the tensors of the rest have been moved to the device. They may be on the CPU
            until a network is cut, or it is known that none will be.
    """

    def __init__(
        self,
        module: nn.Module,
        start: nn.Module,
        group: Group,
        device: torch.device,
        survivors: Survivors | None = None,
    ) -> None:
        self._module = module
        self._start = start
        self._group = group
        self._device = device
        self._survivors = survivors
        self.networks: list[AveragingGroup] = []
        self._cut: set[str] = set()
        # DDP does not broadcast what is registered later
        self._buffers = frozenset(name for name, _ in module.named_buffers())
        self.here = False
        self.rest = self._make_rest()

    def add(self, averaging_group: AveragingGroup, names: Iterable[str]) -> None:
        """Register a network that was cut, so that its tensors are no part of the rest any more.

        Args:
            averaging_group: the group of this rank's stages of the network.
            names: in the LightningModule, of the tensors that stages on any rank own.
        """
        self.networks.append(averaging_group)
        self._cut.update(names)
        self.here = True
        self.renew_rest()

    def note_no_cut(self) -> None:
        """Register that no network will be cut: all tensors are of the rest, on the device."""
        if not self.here:
            self.here = True
            self.renew_rest()

    def renew_rest(self) -> None:
        """Replace the group of the rest by one of the tensors that no network owns now."""
        self.rest.close()
        self.rest = self._make_rest()

    def close(self) -> None:
        """Take the hooks of all groups off the parameters, at the end of the run."""
        for averaging_group in (self.rest, *self.networks):
            averaging_group.close()

    def _make_rest(self) -> AveragingGroup:
        """Make the group of the tensors that no network owns now; move them if :attr:`here`.

        Deferred tensors are left out.
        """
        cut = self._identities()
        parameters = [p for p in self._module.parameters() if not (id(p) in cut or is_deferred(p))]
        if self.here:
            for tensor in (*parameters, *self._buffers_of_the_rest()):
                tensor.data = tensor.data.to(self._device)
        return AveragingGroup(
            parameters, self._buffers_of_the_rest, self._group, survivors=self._survivors
        )

    def _buffers_of_the_rest(self) -> list[Tensor]:
        cut = self._identities()
        known = (b for name, b in self._module.named_buffers() if name in self._buffers)
        return [b for b in known if not (id(b) in cut or is_deferred(b))]

    def _identities(self) -> set[int]:
        """The ``id`` of each tensor that networks own now (the user's code may replace buffers)."""
        if not self._cut:
            return set()
        named = tensors_of(self._start)
        return {id(named[name]) for name in self._cut if name in named}


class Weights:
    """Moves parameters and buffers between the driver and the workers that own them.

    Args:
        module: the LightningModule.
        start: see :class:`Replicated`.
        coordinates: the coordinates of this rank.
        commands: sends commands to the workers.
        ownership: which worker owns which tensor.
        replicated: the data-parallel groups of what this rank owns.
        files: reads the files that workers write their tensors to.
    """

    def __init__(
        self,
        module: nn.Module,
        start: nn.Module,
        coordinates: Coordinates,
        commands: Commands,
        ownership: Ownership,
        replicated: Replicated,
        files: FilesOfWorkers,
    ) -> None:
        self._files = files
        self._module = module
        self._start = start
        self._coordinates = coordinates
        self._commands = commands
        self._remote = commands.remote
        self._ownership = ownership
        self._replicated = replicated
        # (a parameter that replaces one of these in the middle of a run is this rank's alone)
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._before: dict[int, tuple[Tensor, int]] = {}

    def remember(self) -> None:
        """Note the versions of this rank's weights and buffers, for :attr:`changed`."""
        self._before = self._versions()

    @property
    def changed(self) -> bool:
        """Whether calls or the user's code have changed weights or buffers since :meth:`remember`.

        It is asked at the end of an evaluation; after one that has changed none, workers' weights
        need not come back. (A change through ``data`` is not seen: it stays on this rank.)
        """
        before = {identity: count for identity, (_, count) in self._before.items()}
        now = self._versions().items()
        here = any(before.get(identity) != count for identity, (_, count) in now)
        return here or self._remote.changed

    def _versions(self) -> dict[int, tuple[Tensor, int]]:
        """By ``id``, each tensor of the LightningModule with its version counter.

        Proxies, and tensors without memory, are left out. (The tensor is kept: one that replaces it
        could have its ``id`` else.)
        """
        with as_they_are():
            plain = (t for t in tensors_of(self._module).values() if type(t) in (Tensor, Parameter))
            return {id(t): (t, version(t)) for t in plain if not t.is_meta}

    @signals_deferred
    def take_back(self, trained: Collection[int] | None) -> frozenset[str]:
        """Take back tensors that workers own and have not changed, and that can be made again here.

        These are deferred tensors that were lent to workers before their numbers were made. They
        are deferred again, and owned by this rank.

        Args:
            trained: ``id`` of each parameter that the run may have changed; it may have changed all
                buffers too. ``None``: it has changed nothing.

        Returns:
            Names of the tensors that were taken back.
        """
        lent = {name: t for name, t in self.owned_elsewhere().items() if is_lent(t)}
        if trained is not None:
            frozen = {n for n, t in lent.items() if isinstance(t, Parameter)}
            lent = {n: t for n, t in lent.items() if n in frozen and id(t) not in trained}
        for tensor in {id(t): t for t in lent.values()}.values():
            take_back(tensor)
        return frozenset(lent)

    def bring_into_module(self, *, but: frozenset[str] = frozenset()) -> None:
        """Map the weights, buffers and gradients of the workers into the module, after a run.

        Args:
            but: names of the tensors that this rank has already, from :meth:`take_back`.

        Raises:
            NoRoom: there is no room for a file of them.
        """
        self._remote.adopt_replaced(computes=False)
        owned = self.owned_elsewhere().keys() - but
        found = self._files.tensors(at_end=True, but=but) if owned else []
        for file in found:
            weights = {name: value for name, value in file["weights"].items() if name in owned}
            put_mapped(self._start, weights)
        self._remote.adopt_fetched()
        gradients = {name: g for file in found for name, g in file["gradients"].items()}
        self._remote.leave_gradients(gradients)

    def leave_inference(self) -> None:
        """At the end of a run: make ordinary tensors of buffers that are inference tensors.

        Evaluations have put these in the place of buffers. (On one device `self.count += 1` in
        inference mode changes an ordinary buffer in place.)
        """
        for part in self._module.modules():
            _, buffers = tables(part)
            for key, value in buffers.items():
                if value is not None and value.is_inference():
                    with torch.inference_mode(False):
                        buffers[key] = value.clone()

    @contextmanager
    def gathered(self, *, unread: bool = False) -> Iterator[None]:
        """Inside, the module has the weights of all stages, those of workers mapped from files.

        They are no proxies inside, so that a state dict can be made.

        Args:
            unread: whether weights of workers stay there instead, and are fetched one by one when
                they are read.

        Raises:
            NoRoom: there is no room for the files.
        """
        values = self._unread() if unread else self._mapped()
        with having_all(self._start, values), self._remote.showing(values):
            yield

    @signals_deferred
    def _unread(self) -> dict[str, Tensor]:
        """By name, unread tensors for what workers own, which are fetched when they are read.

        Sparse ones are fetched at once.
        """
        if not self._ownership.any_network:
            return {}
        self._remote.adopt_replaced(computes=False)
        self._remote.flush()
        with as_they_are():
            owned = self.owned_elsewhere()
            dense = {n: t for n, t in owned.items() if t.layout is torch.strided}
            specs = {name: TensorSpec.of(tensor, gradient=False) for name, tensor in dense.items()}
        here = self._coordinates.index
        unread = {
            name: self._files.unread(
                TensorAddress(here + self._ownership.rank_of(name), name), spec
            )
            for name, spec in specs.items()
        }
        # (sparse tensors are fetched at once)
        return unread | self._ownership.give(
            RemoteKind.PARAMETER, [n for n in owned if n not in specs]
        )

    @signals_deferred
    def _mapped(self) -> dict[str, Tensor]:
        """By name, what workers own, mapped from files."""
        if not self._ownership.any_network:
            return {}
        self._remote.adopt_replaced(computes=False)
        elsewhere = self.owned_elsewhere()
        named = (pair for file in self._files.tensors() for pair in file["weights"].items())
        return {name: value for name, value in named if name in elsewhere}

    def owned_elsewhere(self) -> dict[str, Tensor]:
        """By name, the tensors that workers own, but for those that the user's code has replaced.

        Those of layers that it has removed are among them: its optimizers may have them still.
        """
        tensors = tensors_of(self._start)
        return {
            name: tensors[name]
            for name in self._ownership.network_of
            if name in tensors and self._parameters.get(name, tensors[name]) is tensors[name]
        }

    @signals_deferred
    def scatter(self) -> None:
        """Give the workers the weights of their stages as they stand in the module, after a load.

        Memory of deferred tensors is then freed here.
        """
        tensors = self.owned_elsewhere()
        workers = self._commands.workers
        for worker in workers.ranks if self._ownership.any_network else ():
            owned = [name for name in self._ownership.tensors_of(worker) if name in tensors]
            with as_they_are():
                workers.send(worker, TakeWeights(to_send(tensors, owned).items()))
            leave_to_worker(
                tensors, owned, f"on {self._coordinates.at(worker)}", self._remote.gradients
            )
        self._remote.adopt_fetched()

    @signals_deferred
    def broadcast_buffers(self, *, state: bool = False) -> None:
        """Give every replica the buffers of replica 0 (collective over the drivers).

        The workers are told to do so too, for their stages.

        Args:
            state: whether only the buffers that training steps read are sent
                (:func:`~lightning_hybrid.stage.state_buffers`); else all.
        """
        self._commands.tell(SynchronizeBuffers(state))
        among = state_buffers(self._module) if state else None
        for averaging_group in self._replicated.networks:
            averaging_group.broadcast_buffers(among)
        if self._replicated.here or not self._commands.workers.ranks:
            self._replicated.rest.broadcast_buffers(among)


def bring_here(module: nn.Module) -> None:
    """Before a run: read the tensors of a module that an earlier run has left in files.

    They are ordinary tensors in memory then.

    Raises:
        NoAddresses: the address space has no room for them.
        DeferredError: one was lost with an earlier run.
    """
    tensors = (*module.parameters(), *module.buffers())
    refuse_lost(tensors)
    materialize(filter(is_unread, tensors))


def present_bytes(module: nn.Module, device: torch.device) -> int:
    """Bytes of a module's tensors that are on a device, and so missing in its measured free memory.

    The planner adds them to it, since the network itself may use this memory. On a GPU it is 0:
    its free memory is measured before weights come to it.

    Args:
        module: the module that is to be cut.
        device: the device of this rank.
    """
    if device.type != "cpu":
        return 0
    with as_they_are():
        tensors = (*module.parameters(), *module.buffers())
        return sum(t.nbytes for t in tensors if t.device == device and not is_deferred(t))
