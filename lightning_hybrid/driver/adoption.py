"""From a captured graph to its stages on all ranks: plan it, cut it, check it, hand it out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.autograd import own_saved_tensors
from lightning_hybrid._torch.modules import BatchNorm
from lightning_hybrid.comm import Mesh, broadcast_object
from lightning_hybrid.comm.protocol import Placement
from lightning_hybrid.driver.announcements import Announcements
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.driver.driver import Driver
from lightning_hybrid.driver.found_network import FoundNetwork, count
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.driver.network_options import NetworkOptions
from lightning_hybrid.errors import HybridError, NetworkError, PlanError
from lightning_hybrid.graph import (
    CannotFollow,
    NetworkGraph,
    NetworkPartition,
    StageCode,
    collecting,
    cut,
    cut_at,
    find_boundary,
    follow,
    place_of,
    why_whole,
)
from lightning_hybrid.planning import CalledNetwork, Plan
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.stage import (
    Synchronised,
    borrowed_parameters,
    check,
    tensors_of,
    with_room_for,
)


@dataclass(frozen=True)
class _FirstCall:
    """What is known of a network when it is planned.

    Attributes:
        found: the module that it is, or of whose chain of graphs it is one.
        graph: of it.
        partitions: of the graph.
        leaves: the inputs of the graph in this call, where the network is.
        is_part: whether the user's cut points may be for a larger module, which it is part of.
    """

    found: FoundNetwork
    graph: NetworkGraph
    partitions: Sequence[NetworkPartition]
    leaves: Sequence[Tensor]
    is_part: bool


class Adoption:
    """Makes networks of captured graphs.

    Args:
        driver: of this replica.
        mesh: the groups.
        options: how networks are cut.
        plans: plans of networks that were found in earlier runs, by name; new ones are added.

    Attributes:
        driver: see above.
        options: likewise.
        announcements: what the user is told.
    """

    def __init__(
        self, driver: Driver, mesh: Mesh, options: NetworkOptions, plans: dict[str, Plan]
    ) -> None:
        self.driver, self._mesh, self.options, self._plans = driver, mesh, options, plans
        self.announcements = Announcements(options)
        self._placed: dict[str, Plan] = {}  # in this run; plans of earlier ones may be of others

    def adopt(
        self,
        found: FoundNetwork,
        graph: NetworkGraph,
        partitions: Sequence[NetworkPartition],
        values: Sequence[Any],
        *,
        is_part: bool,
    ) -> NetworkCall:
        """Give all ranks their stages of a new network.

        Args:
            found: the module that it is, or of whose chain of graphs it is one.
            graph: of it.
            partitions: of the graph.
            values: the arguments of the graph in this call.
            is_part: whether the user's cut points may be for a larger module, which it is part of.

        Raises:
            HybridError: the graph cannot be cut as asked, or does not run by itself.
        """
        with _as_if_alone():
            leaves = _where_the_network_is(found.module, graph.bind(values))
            with _named(found):
                first = _FirstCall(found, graph, partitions, leaves, is_part)
                plan, codes = self._plan_and_cut(first)
            parts = self._parts(found, graph, leaves, plan.microbatches)
            self.announcements.doing(found, "handing out the stages of")
            devices = (*plan.devices, 0) if _collects(plan) else plan.devices
            placement = Placement.of(
                codes, devices, plan.schedule, plan.split or (), plan.recompute
            )
            refuse_streaming(found, graph, plan, placement, first=not self.driver.has_networks)
            # Python between graphs, and one device, draw from the generators of the code around a
            # call: their state travels with the batch, and back
            continues = not found.whole or self.driver.calls.follows
            network = self.driver.add_network(
                found.name, found.module, codes, placement, continues=continues
            )
        found.driven.append((network, plan))
        found.calls[graph] = NetworkCall(network, network.specialize(graph, parts))
        if found.whole:
            found.capture.own(network.owned_names)
        return found.calls[graph]

    def _plan_and_cut(self, first: _FirstCall) -> tuple[Plan, list[StageCode]]:
        """The plan of a network, and its stages, which compute what the graph does."""
        found, graph, partitions = first.found, first.graph, first.partitions
        # further graphs of a chain are networks of their own, and plans are kept by name
        key = f"{found.name}#{len(found.driven) + 1}" if found.driven else found.name
        self.announcements.doing(found, "planning")
        plan = self._plan(key, first)
        boundaries = [find_boundary(partitions, name) for name in plan.cuts]
        collects = _collects(plan)
        codes = cut(graph, partitions, boundaries, self.driver.device, collects=collects)
        if found.is_materialized:
            self.announcements.doing(found, "checking the stages of")
            # before any rank has its stages: a network that is refused here is still whole
            check(graph, codes, first.leaves, with_room_for(found.module, self.driver.device))
        return plan, codes

    def add(
        self,
        found: FoundNetwork,
        known: tuple[DrivenNetwork, Plan],
        graph: NetworkGraph,
        values: Sequence[Any],
    ) -> NetworkCall:
        """Give all ranks their stages of another graph of a network, cut at the same places.

        Args:
            found: the module.
            known: the network, and its plan.
            graph: the graph.
            values: its arguments in this call.

        Raises:
            CannotFollow: the tensors that it needs are in other places.
            NetworkError: they have other names than when the network was cut.
        """
        network, plan = known
        _refuse_moved(found, graph, values)
        refusal = why_not_cut(graph)
        if refusal is not None:
            raise CannotFollow(f"it {refusal}")
        refuse_streaming(found, graph, plan, network.placement)
        positions = follow(graph, network.placement.owned[: plan.stages])
        if _collects(plan):
            # outputs of copies of the last stage are joined by one more stage, which has no layers
            positions += collecting(graph)
        with _as_if_alone():
            codes = cut_at(graph, positions, self.driver.device)
            parts = self._parts(found, graph, graph.bind(values), plan.microbatches)
            self.driver.distribution.distribute_again(network, codes)
        found.calls[graph] = NetworkCall(network, network.specialize(graph, parts))
        self.announcements.captured_again(found)
        return found.calls[graph]

    # ------------------------------------------------------------------ micro-batches

    def _parts(
        self, found: FoundNetwork, graph: NetworkGraph, leaves: Sequence[Tensor], wanted: int
    ) -> int:
        """Into how many micro-batches a batch may be split in calls of this graph."""
        # (of a batch that is not divided it need not be proven that samples do not meet)
        if wanted == 1 or _is_one_sample(graph, leaves):
            return 1
        reason = self._why_whole(found, graph, leaves, wanted)
        if reason is None:
            self.announcements.is_split(found, graph)
            return wanted
        self.announcements.takes_batches_whole(found, reason)
        return 1

    def _why_whole(
        self, found: FoundNetwork, graph: NetworkGraph, leaves: Sequence[Tensor], wanted: int
    ) -> str | None:
        key = graph, wanted
        if key not in found.why_whole:
            self.announcements.doing(found, "trying to split batches of")
            found.why_whole[key] = (
                "it was captured as several graphs, between which its Python runs for the whole "
                "batch, and this one draws random numbers or has batch normalisation"
                if not found.whole and (graph.uses_rng or _is_normalised(found.module))
                else why_whole(graph, leaves, wanted)
            )
        return found.why_whole[key]

    # ------------------------------------------------------------------ plans

    def _plan(self, name: str, first: _FirstCall) -> Plan:
        """The plan of replica 0, or its error, on all drivers."""
        if not self._is_known(name, first.partitions):
            made: Plan | HybridError | None = None
            if self._mesh.coordinates.dp_rank == 0:
                try:
                    made = self._choose_plan(first)
                except HybridError as error:
                    if self._mesh.coordinates.replicas == 1:
                        raise
                    made = error  # the other drivers wait for this
            # measured times differ from rank to rank, and all replicas must cut at the same places
            plan: Plan | HybridError = broadcast_object(self._mesh.drivers, made)
            if isinstance(plan, HybridError):
                raise plan
            self._plans[name] = plan
            self.announcements.planned(first.found, plan)
        self._placed[name] = self._plans[name]
        return self._plans[name]

    def _is_known(self, name: str, partitions: Sequence[NetworkPartition]) -> bool:
        """Whether an earlier run has planned a network of this name that has these cuts."""
        try:
            # the code may be another one than in that run: then its cuts are not in this graph
            [find_boundary(partitions, cut) for cut in self._plans[name].cuts]
        except (KeyError, NetworkError):
            return False
        return True

    def _choose_plan(self, first: _FirstCall) -> Plan:
        found, graph, partitions = first.found, first.graph, first.partitions
        leaves = first.leaves
        devices = self._mesh.coordinates.ranks_per_replica
        stages = self.options.stages or devices
        if len(partitions) < stages:
            raise PlanError(
                f"{found.shown} has {count(len(partitions), 'network partition')}, fewer than "
                f"pipeline_parallel_size={stages}. Use at most "
                f"{count(len(partitions), 'stage')}, or name another network: "
                f"the strategy's network='...'.{_why_not_more(graph, partitions, leaves)}"
                f"{'' if first.is_part else _part_of_another(found.name)}"
            )
        wanted = self.options.microbatches or _microbatches(graph, leaves, devices)
        # a plan is for the work of one micro-batch, which is what a stage is given at a time
        slices = [list(leaves)]
        if wanted > 1 and not _is_one_sample(graph, leaves):
            reason = self._why_whole(found, graph, leaves, wanted)
            if reason is not None:
                self.announcements.takes_batches_whole(found, reason)
                wanted = 1
            slices = graph.split(leaves, wanted)
        make, beside = self.options.planner, [*self._placed.values()]
        called = CalledNetwork(
            name=found.name, graph=graph, partitions=partitions, leaves=slices[0]
        )
        by, tried = (graph.split_by, graph.tried) if len(slices) > 1 else ("", ())
        try:
            plan = make(called, wanted, beside=beside, chosen=False)
        except NetworkError as error:
            # the user's cut points are for the network as a whole, of which this is a part
            if not first.is_part:
                raise
            self.announcements.say(found, f"is cut where it divides best: {error}.")
            plan = make(called, wanted, beside=beside, chosen=True)
        return replace(plan, split_by=by, tried=tried)


def refuse_streaming(
    found: FoundNetwork,
    graph: NetworkGraph,
    plan: Plan,
    placement: Placement,
    *,
    first: bool = True,
) -> None:
    """What a network must not do where forwards of later batches begin early.

    Args:
        found: the module.
        graph: of it.
        plan: its plan.
        placement: where its stages are.
        first: whether no other network is cut.

    Raises:
        NetworkError: it does.
    """
    schedule = STREAMED.get(plan.schedule)
    if schedule is None:
        return
    reason, parameters = None, dict(graph.network.named_parameters())
    owned = [[name for name in names if name in parameters] for names in placement.owned]
    tied = frozenset[str]().union(*borrowed_parameters(owned, placement.devices))
    checkpointed = schedule.delayed and graph.is_checkpointed
    if not first:
        reason = "another network is cut, too"
    elif not found.whole:
        reason = "it was captured as several graphs, which wait for the Python between them"
    elif tied:
        reason = f"its stages share {min(tied)!r}, which must be the same in all of them"
    elif graph.writes_parameters:
        reason = "it changes its parameters in its forward"
    elif made := [leaf.name for leaf in graph.leaves if leaf.made]:
        reason = (
            f"it makes {made[0]!r} of its inputs for the whole batch (random numbers, statistics), "
            "which is not known of later batches; num_microbatches=1 leaves that to its stages"
        )
    elif graph.written_leaves:
        reason = "it writes into its inputs, which are a later batch's"
    elif checkpointed:
        reason = (
            "it has a region of activation checkpointing, which would be computed again with "
            "other weights (schedule's own delayed_weights='recompute' saves more memory)"
        )
    if reason is not None:
        raise NetworkError(
            f"{found.shown} cannot run under schedule={schedule.name!r}, which begins with later "
            f"batches early: {reason}. Use schedule='gpipe'."
        )


def _collects(plan: Plan) -> bool:
    """Whether a stage without layers takes the outputs from copies of the last one."""
    return plan.copies[-1] > 1


def _refuse_moved(found: FoundNetwork, graph: NetworkGraph, values: Sequence[Any]) -> None:
    """All ranks know tensors by their names, and the modules of workers do not follow the user's.

    Raises:
        NetworkError: layers have changed places since the network was cut.
    """
    now = tensors_of(found.module)
    for node, name in graph.tensors.items():
        tensor = values[graph.place[node]]
        if now.get(name) is not tensor:
            names = (repr(other) for other, each in now.items() if each is tensor)
            raise NetworkError(
                f"{found.shown}: what was {name!r} when it was cut into stages is "
                f"{next(names, 'elsewhere')} now. Modules have changed places, or were wrapped, "
                "and the stages on other ranks do not follow. Do it before `trainer.fit` (in "
                "`configure_model`, `setup` or `on_fit_start`) or `fabric.setup`, or change what "
                "`forward` calls."
            )


def why_not_cut(graph: NetworkGraph) -> str | None:
    """What keeps a graph from being cut anywhere, said of its network; ``None``: nothing."""
    for leaf in graph.leaves:
        if not leaf.number and not graph.info[leaf.node].is_strided:
            return f"takes a tensor that is not dense ({leaf.name})"
    if graph.uncuttable is not None:
        return f"has {graph.uncuttable}, which runs Python of the user's later"
    if not graph.leaves:
        return "takes no tensor"
    if not graph.tensor_outputs:
        return "returns no tensor that it computes"
    return None


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Inside, the modes and hooks around a call do not change how its network is looked at.

    The first call may be a validation's, and what is learned from it is for training too; or it
    may be inside of activation checkpointing, which counts the tensors that are saved.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        own_saved_tensors(),
        Synchronised.paused(),
    ):
        yield


@contextmanager
def _named(found: FoundNetwork) -> Iterator[None]:
    """An error in here, where what was captured first runs, says of which network it is."""
    try:
        yield
    except HybridError:
        raise
    except Exception as error:
        raise NetworkError(
            f"{found.shown} was captured, but what was captured does not run by itself "
            f"({type(error).__name__}: {error}). Name the part of the model that is to be cut: "
            "the strategy's network='...'."
        ) from error


def _why_not_more(
    graph: NetworkGraph, partitions: Sequence[NetworkPartition], leaves: Sequence[Tensor]
) -> str:
    """Where a network could not be cut, one line each; or where in its code it has weights."""
    empty = [list(leaf.shape) for leaf in leaves if leaf.dim() and not len(leaf)]
    if empty:
        return f"\nIts first training call is without samples (input of shape {empty[0]})."
    places = [place for partition in partitions for place in partition.refused]
    lines = [f"\nIt cannot be cut before {name!r}: {reason}." for name, reason in places[:3]]
    if not lines:
        users = [layer for layer in graph.layers if layer.parameters]
        places_of_users = ((y.module or y.name, place_of(y.node)) for y in users[:3])
        names = [f"{name!r} ({place})" if place else f"{name!r}" for name, place in places_of_users]
        lines = [f"\nIt has weights in {', '.join(names)}{', ...' * (len(users) > 3)}."]
    return "".join(lines)


def _part_of_another(name: str) -> str:
    """What to do about a module of a container of which only slices or parts are called."""
    outer = name.rpartition(".")[0]
    if not outer:
        return ""
    return (
        f"\nIt was called by itself, and {outer!r}, of which it is a part, was not: a slice of a "
        f"module (self.{outer}[:2]) is no part of the LightningModule. Call self.{outer} whole."
    )


def _is_normalised(module: nn.Module) -> bool:
    return any(isinstance(m, BatchNorm) and m.training for m in module.modules())


def _where_the_network_is(network: nn.Module, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The inputs on the network's device: before it is cut it waits on the CPU."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    return [leaf.to(device) for leaf in leaves]


def _microbatches(graph: NetworkGraph, leaves: Sequence[Tensor], stages: int) -> int:
    """Enough to fill the pipeline twice, but no slices of one sample if that can be avoided.

    (On CPUs a convolution of a single sample takes a path that is several times slower.)
    """
    batch = graph.batch_of(leaves) or _first_size(leaves)
    return max(1, min(2 * stages, batch // 2))


def _is_one_sample(graph: NetworkGraph, leaves: Sequence[Tensor]) -> bool:
    """Whether a call has a single sample, which has no parts, and tells nothing of others."""
    return graph.is_static and _first_size(leaves) == 1


def _first_size(leaves: Sequence[Tensor]) -> int:
    return next((leaf.shape[0] for leaf in leaves if leaf.dim()), 1)
