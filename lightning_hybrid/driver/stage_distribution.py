"""Distributes the stages of a network to the ranks of a replica: code, weights, links."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_hybrid.comm import Dealt, Devices, Mesh, copies_of, link_copies, signals_deferred
from lightning_hybrid.comm.protocol import Command, Cut, Placement, TakeWeights
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import StageCode, is_running_statistic, make_stages
from lightning_hybrid.stage import (
    Engine,
    Trace,
    borrowed_parameters,
    lent_parameters,
    tensors_of,
)
from lightning_hybrid.state import (
    Takeover,
    leave_to_worker,
    refuse_tied,
    to_send,
)


@dataclass(frozen=True)
class Distributed:
    """A network whose stages are on their ranks.

    Attributes:
        engine: runs the driver's stages.
        remote: by ``pp_rank`` of each worker, names in the LightningModule of the tensors that it
            owns.
        borrowed: per rank of the replica, names in the network of parameters that it uses and
            another rank owns.
        lent: per rank of the replica, names in the network of parameters that it owns and the
            driver uses too.
    """

    engine: Engine
    remote: dict[int, tuple[str, ...]]
    borrowed: list[frozenset[str]]
    lent: list[frozenset[str]]


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
        self._module, self._mesh, self._options = module, mesh, options
        self._commands, self._trace = commands, trace
        self._workers, self._device = commands.workers, commands.remote.device

    def distribute(
        self,
        number: int,
        name: str,
        network: nn.Module,
        codes: Sequence[StageCode],
        placement: Placement,
    ) -> Distributed:
        """Have all ranks make their stages of a network.

        Args:
            number: number of the network: how many there are before it.
            name: dotted name of the network in the LightningModule.
            network: the module.
            codes: the code of each of its stages.
            placement: which ranks get which stage, and under which schedule they run.

        Raises:
            NetworkError: code of a stage cannot be sent to its rank, or its stages cannot be shared
                or copied as the placement says.
            Exception: a worker cannot make its stages.
            DeferredError: stages share a weight that is made in ``configure_model``.
        """
        parameters = dict(network.named_parameters())
        names = [[n for n in code.owned if n in parameters] for code in codes]
        borrowed = borrowed_parameters(names, placement.devices)
        lent = lent_parameters(names, placement.devices, borrowed)
        refuse_tied(name, tensors_of(self._module), borrowed)
        self._refuse_compiled(name, borrowed[0])
        _refuse_copies(name, network, codes, placement.devices)
        links = self._order(number, name, codes, placement, borrowed, lent, linked=False)
        prefix = f"{name}." if name else ""
        remote = self._hand_out_weights(prefix, codes, placement.devices, borrowed)
        engine = self._make_engine(prefix, network, codes, placement, links, borrowed[0])
        return Distributed(engine, remote, borrowed, lent)

    def distribute_again(self, network: DrivenNetwork, codes: Sequence[StageCode]) -> None:
        """Have all ranks make their stages of another graph of a network.

        Args:
            network: the network.
            codes: the code of each stage of the graph, which uses tensors that its rank has.

        Raises:
            NetworkError: code of a stage cannot be sent to its rank, or a stage cannot be copied.
            Exception: a worker cannot make its stages.
        """
        _refuse_copies(network.name, network.module, codes, network.placement.devices)
        # (who borrows which parameter was decided by the first graph of the network)
        nobody = [frozenset[str]() for _ in (0, *self._workers.ranks)]
        self._order(
            *(network.number, network.name, codes, network.placement, nobody, nobody), linked=True
        )
        here = [own.number for own in network.engine.owned]
        stages = make_stages([codes[n] for n in here], network.module, self._device)
        network.engine.add_specialization(dict(zip(here, stages)))

    def _refuse_compiled(self, name: str, borrowed: Iterable[str]) -> None:
        """Refuse to compile a stage of the driver that uses another rank's parameter.

        Args:
            name: of the network.
            borrowed: names of these parameters.

        Raises:
            NetworkError: there are some, and stages are compiled.
        """
        for parameter in borrowed if self._options.stages.compiled else ():
            raise NetworkError(
                f"compile_stages=True: the driver's stage of network {name!r} shares {parameter!r} "
                "with that of another rank, and torch.compile would not hear of its changes. Cut "
                "elsewhere (the strategy's allocation=[...]), or leave compile_stages out."
            )

    @signals_deferred
    def _order(
        self,
        number: int,
        name: str,
        codes: Sequence[StageCode],
        placement: Placement,
        borrowed: Sequence[frozenset[str]],
        lent: Sequence[frozenset[str]],
        *,
        linked: bool,
    ) -> dict[int, Dealt]:
        """Have the workers make their stages, and make the links between the stages of all ranks.

        Args:
            number: number of the network.
            name: dotted name of the network in the LightningModule.
            codes: the code of each stage.
            placement: which ranks get which stage.
            borrowed: per rank, names in the network of parameters that another rank owns.
            lent: per rank, names in the network of parameters that it owns and the driver uses too.
            linked: whether the links are there already.

        Returns:
            By number of the stage, the links of this rank's stages; empty if ``linked``.
        """
        for code in codes:
            # (checked here, where an error can name the function that workers cannot import)
            code.code.check()
        orders: dict[int, Command] = {}
        for worker in self._workers.ranks:
            ranks = enumerate(map(copies_of, placement.devices))
            theirs = {n: codes[n] for n, owners in ranks if worker in owners}
            orders[worker] = Cut(
                *(number, name, theirs, placement, borrowed[worker], lent[worker]),
                *(self._options.seed, self._options.trains),
            )
        self._commands.tell_each(orders)
        # (before their answers, since the workers make their ends of the links before they answer)
        links = {} if linked else link_copies(self._mesh, placement.devices, self._device)
        if links:
            self._mesh.owners(copies_of(placement.devices[next(iter(links))]))
        self._workers.hear(self._workers.ranks)
        return links

    def _hand_out_weights(
        self,
        prefix: str,
        codes: Sequence[StageCode],
        devices: Devices,
        borrowed: Sequence[frozenset[str]],
    ) -> dict[int, tuple[str, ...]]:
        """Send each worker the weights of its stages.

        Args:
            prefix: dotted name of the network in the LightningModule, with a dot behind it.
            codes: the code of each stage.
            devices: which ranks get which stage.
            borrowed: per rank, names in the network of parameters that another rank owns.

        Returns:
            By ``pp_rank`` of the worker, names in the LightningModule of what it owns.
        """
        tensors = tensors_of(self._module)
        remote: dict[int, tuple[str, ...]] = {}
        for worker in self._workers.ranks:
            theirs = [c for c, owners in zip(codes, map(copies_of, devices)) if worker in owners]
            names = {n: prefix + n for code in theirs for n in code.owned}
            values = to_send(tensors, names.values())
            self._workers.send(worker, TakeWeights(values.items()))
            mine = [full for n, full in names.items() if n not in borrowed[worker]]
            remote[worker] = tuple(mine)
            # (after they were sent, since this may free their memory here)
            leave_to_worker(
                tensors,
                remote[worker],
                f"on {self._mesh.coordinates.at(worker)}",
                self._commands.remote.gradients,
            )
        return remote

    def _make_engine(
        self,
        prefix: str,
        network: nn.Module,
        codes: Sequence[StageCode],
        placement: Placement,
        links: Mapping[int, Dealt],
        borrowed: frozenset[str],
    ) -> Engine:
        """Make this rank's stages, on its device, and the engine that runs them."""
        stages = dict(zip(links, make_stages([codes[n] for n in links], network, self._device)))
        here = [*stages.values()]
        mine = [prefix + n for part in here for n in part.tensor_names]
        Takeover(self._module, mine, (), self._mesh.coordinates).settle(())
        for part in here:
            part.move(self._device)
        return Engine(
            *(network, stages, placement, self._options.stages),
            mesh=self._mesh,
            links=links,
            borrowed=borrowed,
            device=self._device,
            seed=self._options.seed,
            trace=self._trace,
        )


def _refuse_copies(
    name: str, network: nn.Module, codes: Sequence[StageCode], devices: Devices
) -> None:
    """Refuse a stage with copies that writes to tensors which copies cannot keep equal.

    Running statistics alone may be written, outside of activation checkpointing.

    Raises:
        NetworkError: a stage does so.
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
            "(pipeline_parallel_size), or cut elsewhere (the strategy's allocation=[...])."
        )
