"""The stages of a network on their way to the ranks of a replica: code, weights, links."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_hybrid.comm import Dealt, Devices, Mesh, copies_of, link_copies, signals_deferred
from lightning_hybrid.comm.protocol import Command, Cut, Placement, TakeWeights
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import StageCode, make_stages
from lightning_hybrid.stage import (
    Engine,
    Trace,
    borrowed_parameters,
    engine_of,
    is_running_statistic,
    tensors_of,
)
from lightning_hybrid.state import (
    Takeover,
    leave_to_worker,
    let_go_of_checkpoints,
    refuse_tied,
    to_send,
)


@dataclass(frozen=True)
class Distributed:
    """A network whose stages are on their ranks.

    Attributes:
        engine: of the driver's stages.
        remote: by ``pp_rank`` of each worker, names in the LightningModule of what it owns.
        borrowed: per rank of the replica, names in the network of what it uses and another one
            owns.
    """

    engine: Engine
    remote: dict[int, tuple[str, ...]]
    borrowed: list[frozenset[str]]


class Distribution:
    """Gives the ranks of a replica their stages.

    Args:
        module: the LightningModule.
        mesh: the groups.
        options: what the run has decided.
        commands: to the workers.
        trace: where the driver's stages record.
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
            number: of the network, the next one.
            name: dotted name of the network in the LightningModule.
            network: the module.
            codes: its stages.
            placement: where they go.

        Raises:
            NetworkError: code of a stage cannot travel to its rank.
            Exception: of a worker that cannot make its stages.
            DeferredError: stages share a weight that is made in ``configure_model``.
        """
        parameters = dict(network.named_parameters())
        borrowed = borrowed_parameters(
            [[n for n in code.owned if n in parameters] for code in codes], placement.devices
        )
        refuse_tied(name, tensors_of(self._module), borrowed)
        self._refuse_compiled(name, borrowed[0])
        _refuse_copies(name, network, codes, placement.devices)
        links = self._order(number, name, codes, placement, borrowed, linked=False)
        prefix = f"{name}." if name else ""
        remote = self._hand_out_weights(prefix, codes, placement.devices, borrowed)
        engine = self._make_engine(prefix, network, codes, placement, links, borrowed[0])
        return Distributed(engine, remote, borrowed)

    def distribute_again(self, network: DrivenNetwork, codes: Sequence[StageCode]) -> None:
        """Have all ranks make their stages of another graph of a network.

        Args:
            network: the network.
            codes: the stages of the graph; each uses tensors that its rank has.

        Raises:
            NetworkError: code of a stage cannot travel to its rank.
            Exception: of a worker that cannot make its stages.
        """
        _refuse_copies(network.name, network.module, codes, network.placement.devices)
        # who borrows what was settled by the first graph of the network
        nobody = [frozenset[str]() for _ in (0, *self._workers.ranks)]
        self._order(network.number, network.name, codes, network.placement, nobody, linked=True)
        here = [own.number for own in network.engine.owned]
        stages = make_stages([codes[n] for n in here], network.module, self._device)
        network.engine.add_specialization(dict(zip(here, stages)))

    def _refuse_compiled(self, name: str, borrowed: Iterable[str]) -> None:
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
        *,
        linked: bool,
    ) -> dict[int, Dealt]:
        """Have the workers make their stages.

        Returns:
            By number, the links of the stages that are here; empty if they are linked already.
        """
        for code in codes:
            # refused here by name: a worker that cannot import a function could only fail
            code.code.check()
        orders: dict[int, Command] = {}
        for worker in self._workers.ranks:
            ranks = enumerate(map(copies_of, placement.devices))
            theirs = {n: codes[n] for n, owners in ranks if worker in owners}
            orders[worker] = Cut(
                *(number, name, theirs, placement, borrowed[worker]),
                *(self._options.seed, self._options.trains),
            )
        self._commands.tell_each(orders)
        # before the answers: the workers open the other ends of these links now
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
            # once it is sent: a message on its way shows the memory that goes now
            leave_to_worker(tensors, remote[worker], self._mesh.coordinates, worker)
            let_go_of_checkpoints()
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
        """This rank's stages, on its device."""
        stages = dict(zip(links, make_stages([codes[n] for n in links], network, self._device)))
        here = [*stages.values()]
        mine = [prefix + n for part in here for n in part.tensor_names]
        Takeover(self._module, mine, (), self._mesh.coordinates).settle(())
        for part in here:
            part.move(self._device)
        return engine_of(
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
    """What the copies of a stage write must be the same in all of them, in one device's order.

    Raises:
        NetworkError: a stage that has copies writes what cannot be exchanged.
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
