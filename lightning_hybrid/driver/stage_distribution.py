"""Distributes the stages of a network to the ranks of a replica: code, weights, links."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor, nn

from lightning_hybrid.comm import Devices, Mesh, connect, copies_of, signals_deferred, stages_of
from lightning_hybrid.comm.protocol import (
    Command,
    CutNetwork,
    FindFiles,
    Placement,
    ReadWeights,
    TakeWeights,
)
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import StageCode, is_running_statistic, make_stages
from lightning_hybrid.remote import file_parts
from lightning_hybrid.stage import (
    Engine,
    Trace,
    borrowed_parameters,
    tensors_of,
)
from lightning_hybrid.state import (
    leave_to_worker,
    make_here,
    to_send,
)


class Distribution:
    """Gives the ranks of a replica their stages.

    Args:
        module: the LightningModule.
        mesh: the process groups and channels of this rank.
        options: what the run has decided.
        commands: sends commands to the workers.
        trace: records what the driver's stages do.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        options: DriverOptions,
        commands: Commands,
        trace: Trace,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._options = options
        self._commands = commands
        self._trace = trace
        self._workers = commands.workers
        self._device = commands.remote.device

    def distribute(
        self,
        number: int,
        name: str,
        network: nn.Module,
        codes: Sequence[StageCode],
        placement: Placement,
    ) -> tuple[Engine, dict[int, tuple[str, ...]]]:
        """Have all ranks make their stages of a network.

        Args:
            number: number of the network: how many there are before it.
            name: dotted name of the network in the LightningModule.
            network: the module.
            codes: the code of each of its stages, from the first stage to the last.
            placement: which ranks get which stage, and under which schedule they run.

        Returns:
            The engine that runs this rank's stages; and by ``pp_rank`` of each worker, the names in
            the LightningModule of the tensors that it owns.

        Raises:
            NetworkError: code of a stage cannot be sent to its rank, or its stages cannot be shared
                or copied as the placement says.
            Exception: a worker cannot make its stages.
        """
        borrowed = borrowed_parameters(network, placement)
        self._refuse_compiled(name, borrowed[0])
        _refuse_copies(name, network, codes, placement.devices)
        self._have_workers_make_stages(number, name, codes, placement)
        prefix = f"{name}." if name else ""
        remote = self._hand_out_weights(prefix, codes, placement.devices, borrowed)
        tied = [prefix + n for n in frozenset().union(*borrowed)]
        return self._make_engine(prefix, network, codes, placement, tied), remote

    def distribute_again(self, network: DrivenNetwork, codes: Sequence[StageCode]) -> None:
        """Have all ranks make their stages of another graph of a network that was distributed.

        No weights are sent: each stage must use only tensors that its rank has already.

        Args:
            network: the network.
            codes: the code of each stage of the graph, from the first stage to the last.

        Raises:
            NetworkError: code of a stage cannot be sent to its rank, or a stage cannot be copied.
            Exception: a worker cannot make its stages.
        """
        _refuse_copies(network.name, network.module, codes, network.placement.devices)
        self._have_workers_make_stages(network.number, network.name, codes, network.placement)
        here = [own.number for own in network.engine.owned]
        stages = make_stages([codes[n] for n in here], network.module, self._device)
        network.engine.add_specialization(dict(zip(here, stages)))

    def _refuse_compiled(self, name: str, borrowed: Iterable[str]) -> None:
        """Refuse to compile a stage of the driver that uses another rank's parameter.

        Args:
            name: name of the network.
            borrowed: names of the parameters that the driver's stages use and other ranks own.

        Raises:
            NetworkError: there is such a parameter, and stages are to be compiled.
        """
        for parameter in borrowed if self._options.stages.compiled else ():
            raise NetworkError(
                f"compile_stages=True: the driver's stage of network {name!r} shares {parameter!r} "
                "with that of another rank, and torch.compile would not hear of its changes. Cut "
                "elsewhere (the strategy's plan=[...]), or leave compile_stages out."
            )

    @signals_deferred
    def _have_workers_make_stages(
        self, number: int, name: str, codes: Sequence[StageCode], placement: Placement
    ) -> None:
        """Have the workers make their stages, connect the ranks with each other, and wait for all.

        Args:
            number: number of the network.
            name: dotted name of the network in the LightningModule.
            codes: the code of each stage.
            placement: which ranks get which stage.

        Raises:
            NetworkError: code of a stage cannot be sent.
            Exception: a worker cannot make its stages.
        """
        for code in codes:
            # (checked here, where an error can name the function that workers cannot import)
            code.code.check()
        orders: dict[int, Command] = {}
        for worker in self._workers.ranks:
            theirs = {n: codes[n] for n in stages_of(placement.devices, worker)}
            orders[worker] = CutNetwork(
                network=number,
                name=name,
                stages=theirs,
                placement=placement,
                seed=self._options.seed,
            )
        self._commands.tell_each(orders)
        # (before their answers, since the workers do the same before they answer)
        connect(self._mesh, placement.devices)
        self._workers.hear(self._workers.ranks)

    def _hand_out_weights(
        self,
        prefix: str,
        codes: Sequence[StageCode],
        devices: Devices,
        borrowed: Sequence[frozenset[str]],
    ) -> dict[int, tuple[str, ...]]:
        """Send each worker the weights of its stages; their memory here is then possibly freed.

        Args:
            prefix: dotted name of the network in the LightningModule, with a dot behind it.
            codes: the code of each stage.
            devices: which ranks get which stage.
            borrowed: per rank, names in the network of parameters that another rank owns.

        Returns:
            By ``pp_rank`` of the worker, names in the LightningModule of what it owns.
        """
        tensors, tied = tensors_of(self._module), frozenset().union(*borrowed)
        remote: dict[int, tuple[str, ...]] = {}
        makes = not (self._options.share and self._mesh.coordinates.dp_rank)
        for worker in self._workers.ranks:
            theirs = [c for c, owners in zip(codes, map(copies_of, devices)) if worker in owners]
            names = {n: prefix + n for code in theirs for n in code.owned}
            values = to_send(tensors, names.values(), makes=makes)
            read = self._have_worker_read(worker, values)
            rest = [(name, value) for name, value in values.items() if name not in read]
            self._workers.send(worker, TakeWeights(rest))
            mine = [full for n, full in names.items() if n not in borrowed[worker]]
            remote[worker] = tuple(mine)
            # (after they were sent, since this may free their memory here)
            leave_to_worker(
                tensors,
                [full for n, full in names.items() if n not in tied],
                f"on {self._mesh.coordinates.at(worker)}",
                self._commands.remote.gradients,
            )
        return remote

    @signals_deferred
    def _have_worker_read(self, worker: int, values: Mapping[str, Tensor]) -> Collection[str]:
        """Have a worker read from files what it is to own, where it has the same files.

        Args:
            worker: ``pp_rank`` of the worker.
            values: by name in the LightningModule, what it is to own.

        Returns:
            Names of the tensors that it reads.
        """
        parts = file_parts(values)
        if not parts:
            return ()
        self._workers.send(worker, FindFiles(frozenset(part.file for part in parts.values())))
        [answer] = self._workers.hear([worker])
        found = {name: part for name, part in parts.items() if part.file in answer.value}
        if found:
            self._workers.send(worker, ReadWeights(found))
        return found

    def _make_engine(
        self,
        prefix: str,
        network: nn.Module,
        codes: Sequence[StageCode],
        placement: Placement,
        tied: Sequence[str],
    ) -> Engine:
        """Make this rank's stages, on its device, and the engine that runs them.

        Args:
            prefix: dotted name of the network in the LightningModule, with a dot behind it.
            network: the network.
            codes: the code of each stage of the network, on any rank.
            placement: which ranks get which stage.
            tied: names in the LightningModule of the weights that several ranks use.
        """
        own = stages_of(placement.devices, self._mesh.coordinates.pp_rank)
        here = make_stages([codes[number] for number in own], network, self._device)
        mine = [prefix + n for part in here for n in part.tensor_names]
        make_here(self._module, mine, tied)
        for part in here:
            part.move(self._device)
        return Engine(
            network,
            dict(zip(own, here)),
            placement,
            self._options.stages,
            mesh=self._mesh,
            seed=self._options.seed,
            trace=self._trace,
        )


def _refuse_copies(
    name: str, network: nn.Module, codes: Sequence[StageCode], devices: Devices
) -> None:
    """Refuse a stage with copies that writes to tensors which copies cannot keep equal.

    Running statistics alone may be written, outside of activation checkpointing.

    Raises:
        NetworkError: a stage with copies writes to something else, or inside of checkpointing.
    """
    for number, (code, copies) in enumerate(zip(codes, map(copies_of, devices))):
        if len(copies) == 1 or not code.written:
            continue
        others = sorted(n for n in code.written if not is_running_statistic(network, n))
        if others:
            how = "in its forward, where each micro-batch may need the value of the one before"
        elif code.checkpointed:
            how = "inside of activation checkpointing, which does so once more in the backward"
        else:
            continue
        raise NetworkError(
            f"stage {number} of network {name or 'self'!r} has {len(copies)} copies, and changes "
            f"{(others or sorted(code.written))[0]!r} {how}. Give that stage one copy "
            "(pipeline_parallel_size), or cut elsewhere (the strategy's plan=[...])."
        )
