"""Plans, cuts and checks a captured graph, and gives all ranks of the replica their stages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
from lightning_hybrid.driver.found_network import FoundNetwork, count, is_materialized
from lightning_hybrid.driver.inside_call import why_not_inside
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.errors import HybridError, NetworkError, PlanError
from lightning_hybrid.graph import (
    CannotFollow,
    NetworkGraph,
    NetworkPartition,
    StageCode,
    collecting,
    cut,
    cut_at,
    cuts_for_owned,
    find_boundary,
    why_whole,
)
from lightning_hybrid.planning import Plan, default_number
from lightning_hybrid.profiling import CalledNetwork, give_back_memory
from lightning_hybrid.schedules import INSIDE, STREAMED
from lightning_hybrid.stage import (
    borrowed_parameters,
    check,
    tensors_of,
    with_room_for,
)


class Adoption:
    """Plans and cuts captured graphs, and gives all ranks their stages.

    Args:
        driver: the driver of this replica.
        mesh: the process groups and channels of this rank.
        options: how networks are cut.
        plans: plans of networks that were found in earlier runs, by name; new ones are added.

    Attributes:
        driver: see above.
        options: see above.
        announcements: tells the user what is done with networks.
    """

    def __init__(
        self, driver: Driver, mesh: Mesh, options: DriverOptions, plans: dict[str, Plan]
    ) -> None:
        self.driver = driver
        self._mesh = mesh
        self.options = options
        self._plans = plans
        self.announcements = Announcements(options)
        self._placed: dict[str, Plan] = {}  # the plans of this run's networks, by name

    def adopt(
        self,
        found: FoundNetwork,
        graph: NetworkGraph,
        partitions: Sequence[NetworkPartition],
        values: Sequence[Any],
        *,
        is_part: bool,
    ) -> NetworkCall:
        """Plan, cut and check a graph, and give all ranks of the replica their stages of it.

        The drivers of all replicas call this together, since replica 0 makes the plan for all.
        ``found`` gets the network as it is cut, its plan and the result.

        Args:
            found: the module that was captured, as this graph or as a chain with this graph in it.
            graph: the captured graph.
            partitions: the network partitions of the graph.
            values: the arguments of the graph in this call.
            is_part: whether the user's cut points may be meant for a larger module that contains
                this one. Then the planner chooses the cuts if the user's do not fit.

        Returns:
            What runs the stages when it is called with the arguments of the graph.

        Raises:
            HybridError: the graph cannot be cut as asked, or fails when it runs by itself.
        """
        with _as_if_alone():
            leaves = _moved_to_network(found.module, graph.bind(values))
            with _named(found):
                first = CalledNetwork(
                    name=found.name, graph=graph, partitions=partitions, leaves=leaves
                )
                plan, codes = self._plan_and_cut(found, first, is_part=is_part)
            parts = self._parts(found, graph, leaves, plan.microbatches)
            self.announcements.doing(found, "handing out the stages of")
            devices = (*plan.devices, 0) if _collects(plan) else plan.devices
            placement = Placement.of(
                codes, devices, plan.schedule, plan.split or (), plan.recompute
            )
            refuse_streamed_network(
                found, graph, plan, placement, first=not self.driver.has_networks
            )
            # the Python between graphs, and with rng="device" the code around a call, draw from the
            # same generators as the network: their state travels with the batch, and back
            network = self.driver.add_network(
                found.name,
                found.module,
                codes,
                placement,
                continues_generators=not found.whole or self.driver.calls.as_on_one_device,
            )
        found.driven.append((network, plan))
        found.calls[graph] = self._network_call(found, network, graph, parts)
        if found.whole:
            found.capture.own(network.owned_names)
        return found.calls[graph]

    def _plan_and_cut(
        self, found: FoundNetwork, first: CalledNetwork, *, is_part: bool
    ) -> tuple[Plan, list[StageCode]]:
        """Plan a network, cut its graph, and check that the stages compute what the graph does.

        No rank gets its stages yet. A network that has deferred tensors is not checked, since its
        weights are not all here.

        Args:
            found: the module that was captured.
            first: its graph, with the partitions and with inputs on the network's device.
            is_part: see :meth:`adopt`.

        Returns:
            The plan, and the code of each stage, from the first stage to the last. If the last
            stage has copies, one more stage follows, without layers, which joins their outputs.

        Raises:
            HybridError: there is no plan, or the stages compute something else than the graph.
        """
        graph, partitions = first.graph, first.partitions
        # (plans are kept by name, and each further graph of a chain is a network of its own)
        key = f"{found.name}#{len(found.driven) + 1}" if found.driven else found.name
        plan = self._plan(key, found, first, is_part=is_part)
        boundaries = [find_boundary(partitions, name) for name in plan.cuts]
        collects = _collects(plan)
        codes = cut(graph, partitions, boundaries, self.driver.device, collects=collects)
        if is_materialized(found.module):
            self.announcements.doing(found, "checking the stages of")
            give_back_memory()
            # before ranks get their stages: if the check fails, the network is still whole here
            check(graph, codes, first.leaves, with_room_for(found.module, self.driver.device))
        return plan, codes

    def add(
        self,
        found: FoundNetwork,
        known: tuple[DrivenNetwork, Plan],
        graph: NetworkGraph,
        values: Sequence[Any],
    ) -> NetworkCall:
        """Cut a further graph of a network that is cut already, and give all ranks their stages.

        It is cut so that each stage uses the weights that its rank owns already.

        Args:
            found: the module.
            known: the network as it is cut already, and its plan.
            graph: the new graph.
            values: the arguments of the graph in this call.

        Returns:
            What runs the stages when it is called with the arguments of the graph.

        Raises:
            CannotFollow: the graph cannot be cut, or uses weights in another order than the stages
                that own them.
            NetworkError: layers have changed places since the network was cut, or its schedule does
                not allow this graph.
        """
        network, plan = known
        _refuse_moved(found, graph, values)
        refusal = why_not_cut(graph)
        if refusal is not None:
            raise CannotFollow(f"it {refusal}")
        refuse_streamed_network(found, graph, plan, network.placement)
        positions = cuts_for_owned(graph, network.placement.owned[: plan.stages])
        if _collects(plan):
            # outputs of copies of the last stage are joined by one more stage, which has no layers
            positions += collecting(graph)
        with _as_if_alone():
            codes = cut_at(graph, positions, self.driver.device)
            parts = self._parts(found, graph, graph.bind(values), plan.microbatches)
            self.driver.distribution.distribute_again(network, codes)
        found.calls[graph] = self._network_call(found, network, graph, parts)
        self.announcements.captured_again(found)
        return found.calls[graph]

    def _network_call(
        self, found: FoundNetwork, network: DrivenNetwork, graph: NetworkGraph, parts: int
    ) -> NetworkCall:
        """Make what runs the stages in the place of a graph, once all ranks have their stages.

        If backwards are to run inside of calls of this graph, and cannot, the user is told why. If
        they are not to, ``graph.no_shares`` is set, so that no micro-batch computes a share of the
        loss.

        Args:
            found: the module that was captured.
            network: the network as it is cut.
            graph: the captured graph.
            parts: into how many micro-batches a batch may be split.
        """
        say = partial(self.announcements.backwards_follow, found)
        if self.options.inside or network.placement.schedule == INSIDE:
            if reason := why_not_inside(network, graph):
                say(reason)
        else:  # (so that nothing is computed for it)
            graph.no_shares = graph.no_shares or "its plan has another schedule"
        return NetworkCall(network, network.specialize(graph, parts), say)

    # ------------------------------------------------------------------ micro-batches

    def _parts(
        self, found: FoundNetwork, graph: NetworkGraph, leaves: Sequence[Tensor], wanted: int
    ) -> int:
        """Decide into how many micro-batches a batch is split in calls of a graph; tell the user.

        Args:
            found: the module that was captured.
            graph: the captured graph.
            leaves: the inputs of the graph in this call.
            wanted: the number that the plan asks for.

        Returns:
            ``wanted``; or 1, if the result of a sample may depend on other samples, or the batch
            has a single sample.
        """
        # (whether samples meet need not be proven for a batch that is not divided)
        if wanted == 1 or _is_one_sample(graph, leaves):
            return 1
        reason = self._why_whole(found, graph, leaves, wanted)
        if reason is None:
            self.announcements.say_it_is_split(found, graph)
            return wanted
        self.announcements.takes_batches_whole(found, reason)
        return 1

    def _why_whole(
        self, found: FoundNetwork, graph: NetworkGraph, leaves: Sequence[Tensor], wanted: int
    ) -> str | None:
        """Find out why batches of a graph must not be split into micro-batches.

        It is found out once for each graph and number, and kept in ``found.why_whole``.

        Args:
            found: the module that was captured.
            graph: the captured graph.
            leaves: the inputs of the graph in this call.
            wanted: the number of micro-batches.

        Returns:
            The reason, as a clause; ``None``: batches may be split.
        """
        key = graph, wanted
        if key not in found.why_whole:
            reason = why_whole(graph, leaves, wanted)
            if not (reason or found.whole) and (graph.uses_rng or _is_normalised(found.module)):
                reason = (
                    "it was captured as several graphs, between which its Python runs for the "
                    "whole batch, and this one draws random numbers or has batch normalisation"
                )
            found.why_whole[key] = reason
        return found.why_whole[key]

    # ------------------------------------------------------------------ plans

    def _plan(self, name: str, found: FoundNetwork, first: CalledNetwork, *, is_part: bool) -> Plan:
        """Take the plan of a network from an earlier run, or have replica 0 make one for all.

        The drivers of all replicas call this together. A new plan is kept by its name, and printed.
        When later networks are planned, the planner is given this plan too, so that it counts what
        its stages take.

        Args:
            name: name of the plan, by which later runs find it.
            found: the module that was captured.
            first: its graph, with the partitions and with inputs on the network's device.
            is_part: see :meth:`adopt`.

        Raises:
            HybridError: replica 0 has found no plan.
        """
        if not self._is_known(name, first.partitions):
            made: Plan | HybridError | None = None
            if self._mesh.coordinates.dp_rank == 0:
                try:
                    made = self._choose_plan(found, first, is_part=is_part)
                except HybridError as error:
                    if self._mesh.coordinates.replicas == 1:
                        raise
                    made = error  # the other drivers wait for the broadcast
            # (one plan for all: times that each replica measures itself would differ)
            plan: Plan | HybridError = broadcast_object(self._mesh.drivers, made)
            if isinstance(plan, HybridError):
                raise plan
            self._plans[name] = plan
            self.announcements.planned(found, plan)
        self._placed[name] = self._plans[name]
        return self._plans[name]

    def _is_known(self, name: str, partitions: Sequence[NetworkPartition]) -> bool:
        """Whether an earlier run of this strategy has left a plan of a name that can be used.

        That is one in memory, whose cuts these partitions allow.
        """
        try:
            # (the code may have changed since that run)
            [find_boundary(partitions, cut) for cut in self._plans[name].cuts]
        except (KeyError, NetworkError):
            return False
        return True

    def _choose_plan(self, found: FoundNetwork, first: CalledNetwork, *, is_part: bool) -> Plan:
        """Choose the number of micro-batches, profile the network on one, and make its plan.

        Called on replica 0 alone. For the arguments see :meth:`_plan`. If no plan fits, twice as
        many micro-batches are tried, if the number is not the user's and backwards may run inside
        of calls. If batches must not be split, the user is told so.

        Raises:
            HybridError: the network cannot be cut as asked.
        """
        graph = first.graph
        partitions = first.partitions
        leaves = first.leaves
        devices = self._mesh.coordinates.ranks_per_replica
        stages = self.options.number_of_stages or devices
        if len(partitions) < stages:
            raise PlanError(
                f"{found.shown} has {count(len(partitions), 'network partition')}, fewer than "
                f"pipeline_parallel_size={stages}. Use at most "
                f"{count(len(partitions), 'stage')}, or name another network: "
                f"the strategy's network='...'.{_why_not_more(partitions)}"
            )
        batch = graph.batch_of(leaves) or _first_size(leaves)
        wanted = self.options.microbatches or default_number(devices, batch)
        # the planner measures partitions on one micro-batch
        slices = [list(leaves)]
        if wanted > 1 and not _is_one_sample(graph, leaves):
            reason = self._why_whole(found, graph, leaves, wanted)
            if reason is not None:
                self.announcements.takes_batches_whole(found, reason)
                wanted = 1
            slices = graph.split(leaves, wanted)
        self.announcements.doing(found, "profiling and planning")
        by = graph.split_by if len(slices) > 1 else ""
        try:
            plan = self._make_plan(found, replace(first, leaves=slices[0]), wanted, is_part=is_part)
        except PlanError as error:
            # (of smaller ones less is alive, where backwards run inside of calls)
            more = 2 * wanted
            enough = len(slices) > 1 and more <= (graph.batch_of(leaves) or 0)
            if self.options.microbatches or graph.no_shares or not enough:
                raise
            smaller = replace(first, leaves=graph.split(leaves, more)[0])
            try:
                plan = self._make_plan(found, smaller, more, is_part=is_part)
            except PlanError:
                raise error from None
        return replace(plan, split_by=by)

    def _make_plan(
        self, found: FoundNetwork, called: CalledNetwork, microbatches: int, *, is_part: bool
    ) -> Plan:
        """Have the planner make the plan of a network.

        Args:
            found: the module that was captured.
            called: the network, with the inputs of one micro-batch.
            microbatches: into how many micro-batches a batch is split.
            is_part: see :meth:`adopt`; the user is told if the planner chooses the cuts.

        Raises:
            HybridError: the network cannot be cut as asked.
        """
        make, beside = self.options.planner, [*self._placed.values()]
        try:
            return make(called, microbatches, beside, False)
        except NetworkError as error:
            # (the user's cut points may be meant for a module that contains this one)
            if not is_part:
                raise
            self.announcements.say(found, f"is cut where it divides best: {error}.")
            return make(called, microbatches, beside, True)


def refuse_streamed_network(
    found: FoundNetwork,
    graph: NetworkGraph,
    plan: Plan,
    placement: Placement,
    *,
    first: bool = True,
) -> None:
    """Refuse a network that cannot run under a streamed schedule, if its plan has one.

    Args:
        found: the module that was captured.
        graph: the captured graph.
        plan: the plan of the network, with the schedule.
        placement: which ranks have which stages.
        first: whether no other network is cut already.

    Raises:
        NetworkError: the network does what such a schedule does not allow.
    """
    schedule = STREAMED.get(plan.schedule)
    if schedule is None:
        return
    reason = None
    tied = frozenset[str]().union(*borrowed_parameters(graph.network, placement))
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
            "other weights (Delayed's weights='recompute' saves more memory)"
        )
    if reason is not None:
        raise NetworkError(
            f"{found.shown} cannot run under schedule={schedule.name!r}, which begins with later "
            f"batches early: {reason}. Use schedule='gpipe'."
        )


def _collects(plan: Plan) -> bool:
    """Whether the last stage has copies, so that a stage without layers joins their outputs."""
    return plan.copies[-1] > 1


def _refuse_moved(found: FoundNetwork, graph: NetworkGraph, values: Sequence[Any]) -> None:
    """Refuse a graph whose weights now have other names in the module than its stages know.

    Workers find the weights of their stages by these names, in modules of their own, which do not
    change when the user's do.

    Args:
        found: the module that was captured.
        graph: the captured graph.
        values: the arguments of the graph in this call, weights included.

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
    """Why a graph cannot be cut anywhere, as a predicate ("takes no tensor").

    ``None``: nothing in the graph forbids it. How many partitions it has is not looked at.
    """
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
    """Inside, gradients are enabled, and inference mode and saved-tensor hooks are off.

    Planning, cuts and checks run inside: the call in which they run is possibly one of a
    validation, in inference mode, and the plan is for training too.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        own_saved_tensors(),
    ):
        yield


@contextmanager
def _named(found: FoundNetwork) -> Iterator[None]:
    """Inside, an error other than a HybridError becomes a NetworkError that names the network."""
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


def _why_not_more(partitions: Sequence[NetworkPartition]) -> str:
    """Lines for an error message: up to three places where a network cannot be cut, and why.

    Each begins with a line break; empty: no place was refused.
    """
    places = [place for partition in partitions for place in partition.refused]
    return "".join(f"\nIt cannot be cut before {name!r}: {why}." for name, why in places[:3])


def _is_normalised(module: nn.Module) -> bool:
    return any(isinstance(m, BatchNorm) and m.training for m in module.modules())


def _moved_to_network(network: nn.Module, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, moved to the device of the network: on the CPU if it has no parameters.

    (Before a network is cut, it is possibly not on the driver's device yet.)
    """
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    return [leaf.to(device) for leaf in leaves]


def _is_one_sample(graph: NetworkGraph, leaves: Sequence[Tensor]) -> bool:
    """Whether a graph was captured for a single sample, which cannot be split."""
    return graph.is_static and _first_size(leaves) == 1


def _first_size(leaves: Sequence[Tensor]) -> int:
    return next((leaf.shape[0] for leaf in leaves if leaf.dim()), 1)
