"""From the first call of a network to its stages on all ranks.

Until the first call nothing is known of the network; that call brings real inputs. It is traced,
planned, cut and checked then and there, and only then runs, like every later call, through the
pipeline.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.compat import BatchNorm, own_saved_tensors
from lightning_hybrid.errors import (
    HybridError,
    NetworkError,
    NetworkNotFoundError,
    PlanError,
)
from lightning_hybrid.network import (
    NetworkGraph,
    NetworkPartition,
    check,
    compiled,
    cut,
    find_boundary,
    network_partitions,
    splits_along_batch,
    trace,
)
from lightning_hybrid.network.effects import untouched
from lightning_hybrid.network.find import Handler, candidates, unwatch, unwatched, watch
from lightning_hybrid.network.structure import rebuild
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.runtime.batchnorm import Synchronised
from lightning_hybrid.runtime.chunks import call_in_chunks
from lightning_hybrid.runtime.driver import DrivenNetwork, Driver
from lightning_hybrid.runtime.large import is_whole
from lightning_hybrid.runtime.mesh import Mesh
from lightning_hybrid.runtime.transport import broadcast_object

Planner = Callable[[str, NetworkGraph, Sequence[NetworkPartition], list[Tensor], int], Plan]
"""Makes a plan from the network's name, its graph and partitions, the inputs of one micro-batch,
and the number of micro-batches."""


@dataclass(frozen=True)
class Discovery:
    """How networks are found and cut.

    Attributes:
        names: of the modules that are networks; ``None``: found.
        microbatches: into how many slices a batch is split; ``None``: by the size of the batch.
        make_plan: see :data:`Planner`.
        training: whether the run trains.
        compiled: run stages through ``torch.compile``.
        automatic: whether the number of stages was not asked for: then a network that cannot be
            cut is no error, and runs on the driver.
        say: prints a line, once for all replicas.
    """

    names: tuple[str, ...] | None
    microbatches: int | None
    make_plan: Planner
    training: bool
    compiled: bool
    automatic: bool
    say: Callable[[str], None]


class Networks:
    """The networks of one LightningModule during one run, on a driver.

    Args:
        module: the LightningModule.
        driver: of this replica.
        mesh: the groups.
        discovery: how.
        plans: plans of networks that were found in earlier runs, by name; new ones are added.
    """

    def __init__(
        self,
        module: nn.Module,
        driver: Driver,
        mesh: Mesh,
        discovery: Discovery,
        plans: dict[str, Plan],
    ) -> None:
        self._module, self._driver, self._mesh = module, driver, mesh
        self._how, self._plans = discovery, plans
        self._cut: set[str] = set()
        self._kept: set[str] = set()
        self._watched: dict[str, nn.Module] = {}
        if mesh.place.stages > 1 or (discovery.microbatches or 1) > 1 or discovery.compiled:
            self._watched = candidates(module, discovery.names)
        self._watch(self._watched, self._called)

    @property
    def found(self) -> bool:
        """Whether a network was found, or none is needed."""
        return bool(self._cut or (self._kept and self._how.automatic)) or not self._watched

    def require(self) -> None:
        """After a whole step: complain if nothing was called.

        Raises:
            NetworkNotFoundError: no watched module was called.
        """
        if not self.found:
            what = "that can be cut" if self._kept else "with parameters"
            raise NetworkNotFoundError(
                f"No call of a module {what} was seen in a whole step of "
                f"{type(self._module).__name__}, so there is nothing to cut into "
                f"{self._mesh.place.stages} stages. Call the network as a module (self(x), "
                "self.net(x)), not by its weights; or use strategy='ddp'."
            )
        if self._kept and not self._cut:
            self._driver.settle()

    def close(self) -> None:
        """Let every module run its own forward again."""
        for module in self._watched.values():
            unwatch(module)

    def _called(
        self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """The first call of a watched module, from outside of any other."""
        inner = {n: m for n, m in self._watched.items() if _inside(n, name)}
        for candidate in inner.values():
            unwatch(candidate)
        if self._mesh.place.stages == 1:
            return self._adopt_whole(name, module).forward(*arguments, **keywords)
        with _as_if_alone():
            try:
                graph = trace(module, arguments, keywords, device=self._driver.device)
            except NetworkError as error:
                if name:
                    self._run_once(module, arguments, keywords)
                    if not self._how.automatic:
                        raise
                    self._keep(name, module, f"cannot be traced ({error})")
                else:
                    # The LightningModule's own forward is more than a network (it logs, say): it
                    # runs here, and what it calls is watched.
                    self._watch({n: m for n, m in inner.items() if n}, self._called)
            else:
                owned = self._adopt(name, module, graph, arguments, keywords)
                self._watch({n: m for n, m in inner.items() if not _share(m, owned)}, self._called)
        return module.forward(*arguments, **keywords)

    @staticmethod
    def _run_once(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A network that cannot be traced may simply fail: then its own error is to be shown."""
        with untouched(module), torch.no_grad():
            module.forward(*arguments, **keywords)

    def _watch(self, modules: Mapping[str, nn.Module], handler: Handler) -> None:
        for name, module in modules.items():
            watch(module, name, handler)

    def _adopt_whole(self, name: str, module: nn.Module) -> nn.Module:
        """One stage: only micro-batches are left to do."""
        chunks = self._how.microbatches or 1
        self._cut.add(name)
        forward: Callable[..., Any] = type(module).forward
        if self._how.compiled:
            forward = compiled(forward)
        watch(module, name, lambda n, m, a, k: call_in_chunks(forward, m, a, k, chunks))
        return module

    def _adopt(
        self,
        name: str,
        module: nn.Module,
        graph: NetworkGraph,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> list[Tensor]:
        """Plan, cut and check a network. Returns the parameters and buffers that stages now own."""
        partitions = network_partitions(graph)
        stages = self._mesh.place.stages
        if len(partitions) < stages and (self._how.automatic or self._others_can_be_cut(name)):
            count = _count(len(partitions), "network partition")
            return self._keep(name, module, f"has {count}, fewer than {stages} stages")
        plan = self._plan(name, graph, partitions, arguments, keywords)
        boundaries = [find_boundary(partitions, first) for first in plan.cuts]
        parts = cut(graph, partitions, boundaries)
        if is_whole(module):  # else an earlier run has checked it
            check(graph, parts, *_where_the_network_is(module, arguments, keywords))
        network = self._driver.add_network(
            name,
            module,
            graph,
            parts,
            boundaries,
            devices=plan.devices,
            microbatches=plan.microbatches,
            schedule=plan.schedule,
        )
        self._cut.add(name)
        here = [part for part, device in zip(parts, plan.devices) if device == 0]
        remote = [p for part in parts if part not in here for p in part.parameters()]
        inner = {n: m for n, m in self._watched.items() if _inside(n, name) and n != name}
        # with tied weights modules of this rank share some with the others
        called_here = {id(module) for part in here for module in part.network_modules}
        inner = {n: m for n, m in inner.items() if id(m) not in called_here}
        self._watch({n: m for n, m in inner.items() if _share(m, remote)}, _refuse_part)
        watch(module, name, lambda n, m, a, k: self._call(network, plan, a, k))
        return network.tensors()

    def _others_can_be_cut(self, name: str) -> bool:
        """Whether a network beside this one is, or by its size may be, cut into stages."""
        return bool(self._cut) or any(
            len(_layers(module)) >= self._mesh.place.stages
            for other, module in self._watched.items()
            if not _inside(other, name) and not _inside(name, other)
        )

    def _keep(self, name: str, module: nn.Module, reason: str) -> list[Tensor]:
        """Leave a network on the driver, whole. Returns its parameters."""
        self._how.say(
            f"Network {name or 'self'!r} ({type(module).__name__}) {reason}: it stays on the driver"
            f"{'' if self._others_can_be_cut(name) else ', as under ddp over the replicas'}."
        )
        self._kept.add(name)
        self._driver.keep(module)
        return list(module.parameters())

    def _call(
        self,
        network: DrivenNetwork,
        plan: Plan,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """A later call: through the pipeline, after a look whether its graph is known."""
        if network.variant_for(arguments, keywords) is None:
            with unwatched(network.module), self._driver.remote.suspended(), _as_if_alone():
                graph = trace(network.module, arguments, keywords, device=self._driver.device)
                partitions = network_partitions(graph)
                boundaries = [find_boundary(partitions, first) for first in plan.cuts]
                stages = cut(graph, partitions, boundaries)
                # else its stages are on several devices, or on several ranks
                if self._driver.device.type == "cpu" and is_whole(network.module):
                    check(graph, stages, arguments, keywords)
            self._driver.add_variant(
                network, graph, stages, boundaries, plan.devices, plan.schedule
            )
        return network(arguments, keywords)

    def _plan(
        self,
        name: str,
        graph: NetworkGraph,
        partitions: Sequence[NetworkPartition],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> Plan:
        """The plan of replica 0, or its error, on all drivers."""
        if name not in self._plans:
            plan: Plan | HybridError | None = None
            if self._mesh.place.replica == 0:
                try:
                    plan = self._make_plan(name, graph, partitions, arguments, keywords)
                except HybridError as error:
                    if self._mesh.place.replicas == 1:
                        raise
                    plan = error  # the other drivers wait for this
            assert self._mesh.drivers is not None
            plan = broadcast_object(self._mesh.drivers, plan)
            if isinstance(plan, HybridError):
                raise plan
            assert plan is not None
            self._plans[name] = plan
            self._say_plan(name, graph.network, self._plans[name])
        return self._plans[name]

    def _make_plan(
        self,
        name: str,
        graph: NetworkGraph,
        partitions: Sequence[NetworkPartition],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> Plan:
        stages = self._mesh.place.stages
        if len(partitions) < stages:
            raise PlanError(
                f"Network {name or 'self'!r} ({type(graph.network).__name__}) has "
                f"{_count(len(partitions), 'network partition')}, fewer than "
                f"pipeline_parallel_size={stages}. Use at most "
                f"{_count(len(partitions), 'stage')}, or name another network: "
                "HybridGabraStrategy(network='...')."
            )
        arguments, keywords = _where_the_network_is(graph.network, arguments, keywords)
        leaves = graph.bind(arguments, keywords)
        wanted = self._how.microbatches or _microbatches(leaves, stages)
        slices = graph.split(leaves, wanted)
        if (
            len(slices) > 1
            and is_whole(graph.network)
            and not splits_along_batch(graph, graph.network, arguments, keywords, wanted)
        ):
            self._how.say(
                f"The output of network {name!r} depends on how the batch is split, so each "
                "batch goes through the stages whole (num_microbatches=1)."
            )
            wanted, slices = 1, [leaves]
        return self._how.make_plan(name, graph, partitions, slices[0], wanted)

    def _say_plan(self, name: str, module: nn.Module, plan: Plan) -> None:
        what = f"Network {name or 'self'!r} ({type(module).__name__})"
        self._how.say(f"{what}: {plan.describe()}".rstrip())
        normalised = any(isinstance(m, BatchNorm) for m in module.modules())
        if normalised and plan.microbatches > 1 and self._how.training:
            self._how.say(
                f"{what} has batch normalisation: in training its statistics "
                f"are those of a micro-batch (1/{plan.microbatches} of a replica's batch), as in "
                "every pipeline. num_microbatches=1 gives the numbers of the whole batch, "
                "Trainer(sync_batchnorm=True) those of all replicas' micro-batches."
            )


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """What surrounds a call is not about looking at the network.

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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _layers(module: nn.Module) -> list[nn.Module]:
    """The modules that own parameters themselves."""
    return [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _where_the_network_is(
    network: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments on the network's device: before it is cut it waits on the CPU."""
    device = next(network.parameters()).device
    moved: tuple[tuple[Any, ...], dict[str, Any]] = rebuild(
        (arguments, dict(keywords)),
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf,
    )
    return moved


def _share(module: nn.Module, parameters: Iterable[Tensor]) -> bool:
    return not {id(p) for p in module.parameters()}.isdisjoint(map(id, parameters))


def _refuse_part(name: str, module: nn.Module, arguments: Any, keywords: Any) -> Any:
    raise NetworkError(
        f"{name!r} ({type(module).__name__}) is part of a network that is cut into stages, and its "
        "weights are on another rank: it cannot be called by itself. Call the whole network, or "
        "name the modules that are called apart: HybridGabraStrategy(network=[...])."
    )


def _microbatches(leaves: Sequence[Tensor], stages: int) -> int:
    """Enough to fill the pipeline twice, but no slices of one sample if that can be avoided.

    (On CPUs a convolution of a single sample takes a path that is several times slower.)
    """
    batch = next((leaf.shape[0] for leaf in leaves if leaf.dim()), 1)
    return max(1, min(2 * stages, batch // 2))
