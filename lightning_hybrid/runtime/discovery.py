"""From the first call of a network to its stages on all ranks.

Until the first call nothing is known of the network; that call brings real inputs. It is captured,
planned, cut and checked then and there, and only then runs, like every later call, through the
pipeline.

A module whose Python cannot be captured as one graph (it prints, logs, or branches on values) runs
that Python as ever, on the driver, and the modules that it calls are looked at in its place; if
none of them is large enough, it becomes a chain of graphs, of which the large ones are cut. A
network that is cut already and is then called in a way that cannot be captured, or that does not
suit its cuts, runs on the driver too, on weights that are fetched for it: slowly, and right.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from lightning_hybrid.comm.collectives import broadcast_object
from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.compat import (
    BatchNorm,
    drop_hooks,
    has_backward_hooks,
    own_saved_tensors,
    without_mode,
)
from lightning_hybrid.errors import (
    HybridError,
    NetworkError,
    NetworkNotFoundError,
    PlanError,
)
from lightning_hybrid.network import (
    Capture,
    NetworkGraph,
    NetworkPartition,
    NotCaptured,
    Stage,
    check,
    compiled,
    cut,
    find_boundary,
    network_partitions,
    why_whole,
)
from lightning_hybrid.network.capture import kind_of
from lightning_hybrid.network.deferred import Hollow, is_unmade, make
from lightning_hybrid.network.find import Handler, candidates, own_forward, unwatch, watch
from lightning_hybrid.network.following import CannotFollow, follow
from lightning_hybrid.network.places import place_of
from lightning_hybrid.network.stage import cut_at
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.runtime.batchnorm import Synchronised
from lightning_hybrid.runtime.chunks import call_in_chunks
from lightning_hybrid.runtime.driver import DrivenNetwork, Driver
from lightning_hybrid.runtime.logging_later import LoggingLater
from lightning_hybrid.runtime.staged import tensors_of


class Planner(Protocol):
    """Makes plans."""

    def __call__(
        self,
        name: str,
        graph: NetworkGraph,
        partitions: Sequence[NetworkPartition],
        leaves: Sequence[Tensor],
        microbatches: int,
        /,
        *,
        chosen: bool,
    ) -> Plan:
        """A plan for a network.

        Args:
            name: of the network.
            graph: of it.
            partitions: of the graph.
            leaves: the inputs of one micro-batch.
            microbatches: their number.
            chosen: choose the cuts, whatever the user has said.
        """


class Progress(Protocol):
    """Hears what is being done before a network's first step."""

    def begin(self, what: str, /) -> None:
        """The first piece of work begins."""

    def doing(self, what: str, /) -> None:
        """What is being done now, if something has begun."""

    def over(self) -> None:
        """All is done."""


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
        progress: hears what is being done.
    """

    names: tuple[str, ...] | None
    microbatches: int | None
    make_plan: Planner
    training: bool
    compiled: bool
    automatic: bool
    say: Callable[[str], None]
    progress: Progress


@dataclass(eq=False)
class _Found:
    """A module that the user's code calls.

    Attributes:
        name: its dotted name in the LightningModule.
        module: the module.
        forward: its own, as the user has it.
        hollow: shows its weights to TorchDynamo.
        whole: whether it is one graph; else a chain of them.
        capture: of its calls.
        driven: its graphs that are cut, with their plans.
        why_whole: per identity of a graph and number of micro-batches, why it is not split.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    hollow: Hollow
    whole: bool
    capture: Capture
    emptied: ExitStack | None = None
    driven: list[tuple[DrivenNetwork, Plan]] = field(default_factory=list)
    why_whole: dict[tuple[int, int], str | None] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """How messages name it."""
        return f"Network {self.name or 'self'!r} ({type(self.module).__name__})"


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
        self._kept: dict[str, str] = {}
        self._opened: dict[str, str] = {}  # modules that run their own Python, and why
        self._said: set[tuple[str, str]] = set()
        # what a hook makes on this rank alone, the others do not have
        self._shared = {name: kind_of(value) for name, value in tensors_of(module).items()}
        self._logging_later = LoggingLater(module)
        self._watched: dict[str, nn.Module] = {}
        self._ranks = mesh.coordinates.ranks_per_replica
        if self._ranks > 1 or (discovery.microbatches or 1) > 1 or discovery.compiled:
            self._watched = candidates(module, discovery.names)
        self._watch(self._watched, self._called)

    @property
    def found(self) -> bool:
        """Whether a network was found, or none is needed."""
        return bool(self._cut or (self._kept and self._how.automatic)) or not self._watched

    def require(self) -> None:
        """After a whole step: complain if nothing was called.

        Raises:
            NetworkNotFoundError: no watched module was called, or none of them can be cut.
        """
        if not self.found:
            why = "".join(
                f"\n{name or 'self'!r} cannot be captured as one graph:\n{reason}"
                for name, reason in self._opened.items()
            ) + "".join(f"\n{name or 'self'!r} {reason}" for name, reason in self._kept.items())
            what = "that can be cut" if why else "with parameters"
            raise NetworkNotFoundError(
                f"No call of a module {what} was seen in a whole step of "
                f"{type(self._module).__name__}, so there is nothing to cut into "
                f"{self._ranks} stages. Call the network as a module (self(x), "
                "self.net(x)), not by its weights; name it (HybridGabraStrategy(network='...')); "
                f"or use strategy='ddp'.{why}"
            )
        if self._kept and not self._cut:
            self._driver.settle()

    def close(self) -> None:
        """Let every module run its own forward again."""
        for module in self._watched.values():
            unwatch(module)

    # ------------------------------------------------------------------ the first call

    def _called(
        self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """The first call of a watched module, from outside of any other."""
        # a part that several networks share is known under one of its names
        inside = set(map(id, module.modules()))
        inner = {n: m for n, m in self._watched.items() if _inside(n, name) or id(m) in inside}
        for candidate in inner.values():
            unwatch(candidate)
        forward = own_forward(module)
        scripted = [n for n, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]
        if self._ranks == 1:
            self._adopt_whole(name, module, forward)
            return module.forward(*arguments, **keywords)
        if self._opened and len(_layers(module)) < self._ranks:
            self._keep(name, module, "is too small for the stages", quiet=True)
            return forward(*arguments, **keywords)
        if scripted:
            self._keep(
                name, module, f"has a part that is compiled by TorchScript ({scripted[0]!r})"
            )
            return forward(*arguments, **keywords)
        found = self._prepare(name, module, forward, whole=True)
        try:
            return self._captured(found, arguments, keywords)
        except NotCaptured as error:
            reason = error.reason
        hooked = [n or "itself" for n, m in module.named_modules() if has_backward_hooks(m)]
        if hooked:
            reason = f"{hooked[0]!r} has a full backward hook\n{reason}"
        parts = {n: m for n, m in inner.items() if n != name}
        if any(len(_layers(part)) >= self._ranks for part in parts.values()):
            self._open(found, parts, reason)
            return forward(*arguments, **keywords)
        self._opened[name] = _indented(reason)
        found = self._prepare(name, module, forward, whole=False)
        self._say(
            found,
            "becomes several graphs, with its own Python between them on the driver, since it "
            f"cannot be captured as one:\n{_indented(reason)}",
        )
        return self._captured(found, arguments, keywords)

    def _prepare(
        self, name: str, module: nn.Module, forward: Callable[..., Any], *, whole: bool
    ) -> _Found:
        prefix = f"{name}." if name else ""
        shared = {
            full.removeprefix(prefix): kind
            for full, kind in self._shared.items()
            if full.startswith(prefix)
        }
        # annotations of single modules for PyTorchProfiler: what stages run are no modules
        drop_hooks(module, of=("lightning.pytorch.profilers", "pytorch_lightning.profilers"))
        hollow = Hollow(module, self._driver.device)
        capture = Capture(module, forward, lambda g, v: self._run(found, g, v), shared, whole=whole)
        found = _Found(name, module, forward, hollow, whole, capture)
        return found

    def _captured(self, found: _Found, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        remote = self._driver.remote
        with ExitStack() as stack:
            stack.enter_context(self._logging_later())
            if not found.driven:
                self._how.progress.begin(f"capturing {found.name or 'self'!r}")
                stack.callback(self._how.progress.over)
            stack.enter_context(without_mode(Synchronised))
            stack.enter_context(own_saved_tensors())
            stack.enter_context(remote.suspended())
            stack.enter_context(found.hollow)
            if not found.whole:  # its graphs and the Python between them draw from one stream
                stack.enter_context(self._driver.one_stream())
            if found.whole:
                result = found.capture(arguments, keywords)
            elif not found.driven:
                result = self._first_of_chain(found, arguments, keywords)
            else:
                result = self._chain(found, arguments, keywords)
        if not found.driven and found.name not in self._kept:  # it is too early, look again
            watch(found.module, found.name, lambda n, m, a, k: self._call(found, a, k))
        return result

    def _chain(self, found: _Found, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A call of a chain of graphs: the Python between them must not see old weights."""
        with ExitStack() as stack:
            found.emptied = stack
            stack.enter_context(self._driver.remote.emptied())
            try:
                return self._first_of_chain(found, arguments, keywords)
            except RuntimeError as error:
                if "storage" not in str(error).lower():
                    raise
                raise NetworkError(
                    f"{found.shown} uses a weight that another rank owns, in Python between two of "
                    f"the graphs that it was captured as, because of\n{self._opened[found.name]}"
                ) from error

    def _first_of_chain(
        self, found: _Found, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        try:
            return found.capture(arguments, keywords)
        except NotCaptured as error:  # parts of it may have run
            raise NetworkError(
                f"{found.shown} cannot be captured:\n{_indented(error.reason)}\nName the part of "
                "the model that is to be cut: HybridGabraStrategy(network='...')."
            ) from error

    def _run(self, found: _Found, graph: NetworkGraph, values: Sequence[Any]) -> Sequence[Any]:
        """A captured call, or a part of one."""
        with found.hollow.lifted(), self._filled(found):
            driven = self._driven(found, graph)
            if driven is None and not self._waits(found, graph):
                driven = self._adopt(found, graph, values)
            if found.whole:
                self._how.progress.over()
            else:  # what follows may be another graph
                self._doing(found, "capturing")
            if driven is None:
                return _here(graph, values)
            if not driven[0].knows(graph):
                self._add(found, driven, graph, values)
            return driven[0](graph, values)

    @contextmanager
    def _filled(self, found: _Found) -> Iterator[None]:
        """Inside, a chain's weights of other ranks have their memory here again."""
        if found.whole or found.emptied is None:
            yield
            return
        found.emptied.close()
        try:
            yield
        finally:
            found.emptied.enter_context(self._driver.remote.emptied())

    def _driven(self, found: _Found, graph: NetworkGraph) -> tuple[DrivenNetwork, Plan] | None:
        """The network that this graph is another form of, if there is one."""
        those = [one for one in found.driven if not one[0].owned_names.isdisjoint(graph.used)]
        if len(those) > 1:
            raise NetworkError(
                f"{found.shown} cannot be captured as one graph, and two of its graphs share "
                f"{sorted(those[1][0].owned_names & graph.used)[0]!r}:\n{self._opened[found.name]}"
            )
        return those[0] if those else None

    def _waits(self, found: _Found, graph: NetworkGraph) -> bool:
        """Whether a call comes before training, and so tells too little to cut the network by.

        Evaluation may have other layers, one sample only, and no gradients. Until a training step
        calls it, the network is whole here, if it can be.
        """
        if not self._how.training or torch.is_grad_enabled() or not self._is_here(found):
            return False
        found.module.to(self._driver.device)
        return True

    def _open(self, found: _Found, parts: Mapping[str, nn.Module], reason: str) -> None:
        """Let a module run its own Python from here on, and look at the modules that it calls."""
        name, module = found.name, found.module
        self._opened[name] = _indented(reason)
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        make(own)
        for tensor in own:
            tensor.data = tensor.data.to(self._driver.device)
        if name:
            self._say(
                found,
                "runs its own Python on the driver, and the modules that it calls are cut in its "
                f"place, since it cannot be captured as one graph:\n{_indented(reason)}",
            )
        self._watch(parts, self._called)

    def _watch(self, modules: Mapping[str, nn.Module], handler: Handler) -> None:
        for name, module in modules.items():
            watch(module, name, handler)

    def _adopt_whole(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        """One stage: only micro-batches are left to do."""
        chunks = self._how.microbatches or 1
        self._cut.add(name)
        if self._how.compiled:
            forward = compiled(forward)
        watch(module, name, lambda n, m, a, k: call_in_chunks(forward, a, k, chunks))

    def _adopt(
        self, found: _Found, graph: NetworkGraph, values: Sequence[Any]
    ) -> tuple[DrivenNetwork, Plan] | None:
        """Plan, cut and check a network; or leave it on the driver."""
        name, module = found.name, found.module
        refusal = self._cannot_cut(found, graph)
        partitions = network_partitions(graph)
        stages = self._ranks
        if (
            refusal is None
            and len(partitions) < stages
            and (self._how.automatic or self._opened or self._others_can_be_cut(name))
        ):
            count = _count(len(partitions), "network partition")
            refusal = f"has {count}, fewer than {stages} stages"
        if refusal is not None:
            if found.whole:
                self._keep(name, module, refusal)
            else:
                self._kept.setdefault(name, refusal)
            return None
        key = f"{name}#{len(found.driven) + 1}" if found.driven else name
        with _as_if_alone():
            leaves = _where_the_network_is(module, graph.bind(values))
            with _named(found):
                self._doing(found, "planning")
                plan = self._plan(key, found, graph, partitions, leaves)
                boundaries = [find_boundary(partitions, first) for first in plan.cuts]
                codes = cut(graph, partitions, boundaries, self._driver.device)
                if self._is_here(found):
                    self._doing(found, "checking the stages of")
                    check(graph, codes, leaves)
            parts = self._parts(found, graph, leaves, plan.microbatches)
            self._doing(found, "handing out the stages of")
            driven = self._driver.add_network(
                name,
                module,
                graph,
                codes,
                devices=plan.devices,
                parts=parts,
                schedule=plan.schedule,
                continues=not found.whole,
            )
        found.driven.append((driven, plan))
        if found.whole:
            found.capture.own(driven.owned_names)
        self._cut.add(name)
        inner = {n: m for n, m in self._watched.items() if _inside(n, name) and n != name}
        if found.whole:
            owned = driven.tensors()
            self._watch({n: m for n, m in inner.items() if not _share(m, owned)}, self._called)
        watch(module, name, lambda n, m, a, k: self._call(found, a, k))
        return driven, plan

    def _cannot_cut(self, found: _Found, graph: NetworkGraph) -> str | None:
        for leaf in graph.leaves:
            if not leaf.number and not graph.info[leaf.node].is_strided:
                return f"takes a tensor that is not dense ({leaf.node.name})"
        if graph.uncuttable is not None:
            return f"has {graph.uncuttable}, which runs Python of the user's later"
        if not graph.leaves:
            return "takes no tensor"
        if not graph.tensor_outputs:
            return "returns no tensor that it computes"
        return None

    def _others_can_be_cut(self, name: str) -> bool:
        """Whether a network beside this one is, or by its size may be, cut into stages."""
        return bool(self._cut) or any(
            len(_layers(module)) >= self._ranks
            for other, module in self._watched.items()
            if not _inside(other, name) and not _inside(name, other)
        )

    def _keep(self, name: str, module: nn.Module, reason: str, *, quiet: bool = False) -> None:
        """Leave a network on the driver, whole."""
        if not quiet and not self._opened:
            alone = "" if self._others_can_be_cut(name) else ", as under ddp over the replicas"
            self._how.say(
                f"Network {name or 'self'!r} ({type(module).__name__}) {reason}\n"
                f"It stays on the driver{alone}."
                if "\n" in reason
                else f"Network {name or 'self'!r} ({type(module).__name__}) {reason}: it stays on "
                f"the driver{alone}."
            )
        self._kept[name] = reason
        self._driver.keep(module)
        unwatch(module)

    # ------------------------------------------------------------------ later calls

    def _call(self, found: _Found, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A call of a network that is cut."""
        try:
            return self._captured(found, arguments, keywords)
        except NotCaptured as error:
            reason = f"it cannot be captured as one graph:\n{_indented(error.reason)}"
        except CannotFollow as error:
            reason = str(error)
        if not found.whole:  # a part of it has run already
            raise NetworkError(f"{found.shown} cannot be called in this way, since {reason}")
        self._say(
            found,
            "runs on the driver in some calls, on whole batches and on weights that are fetched "
            "for each of them, since " + reason,
        )
        remote = self._driver.remote
        remote.adopt_replaced()
        with self._driver.one_stream():  # its Python and its hooks must run once
            result = found.forward(*arguments, **keywords)
        remote.adopt_replaced()  # what the call itself has replaced
        return result

    def _add(
        self,
        found: _Found,
        known: tuple[DrivenNetwork, Plan],
        graph: NetworkGraph,
        values: Sequence[Any],
    ) -> None:
        """Give all ranks their stages of another graph of a network, cut at the same places.

        Raises:
            CannotFollow: the tensors that it needs are in other places.
        """
        driven, plan = known
        refusal = self._cannot_cut(found, graph)
        if refusal is not None:
            raise CannotFollow(f"it {refusal}")
        positions = follow(graph, driven.owned_by_stage)
        with _as_if_alone():
            codes = cut_at(graph, positions, self._driver.device)
            parts = self._parts(found, graph, graph.bind(values), plan.microbatches)
            self._driver.add_variant(driven, graph, codes, parts)
        self._say_again(found)

    def _parts(
        self, found: _Found, graph: NetworkGraph, leaves: Sequence[Tensor], wanted: int
    ) -> int:
        """Into how many micro-batches a batch may be split in calls of this graph."""
        if wanted == 1 or graph.is_static:
            return 1  # a single sample has no parts
        reason = self._why_whole(found, graph, leaves, wanted)
        if reason is None:
            return wanted
        self._say_whole(found, reason)
        return 1

    def _why_whole(
        self, found: _Found, graph: NetworkGraph, leaves: Sequence[Tensor], wanted: int
    ) -> str | None:
        key = id(graph), wanted
        if key not in found.why_whole:
            self._doing(found, "trying to split batches of")
            found.why_whole[key] = (
                "it was captured as several graphs, between which its Python runs for the whole "
                "batch, and this one draws random numbers or has batch normalisation"
                if not found.whole and (graph.draws or _is_normalised(found.module))
                else why_whole(graph, leaves, wanted, tried=self._is_here(found))
            )
        return found.why_whole[key]

    def _is_here(self, found: _Found) -> bool:
        """Whether numbers of all weights are here (those of other ranks may be old ones)."""
        return not any(map(is_unmade, (*found.module.parameters(), *found.module.buffers())))

    # ------------------------------------------------------------------ plans

    def _plan(
        self,
        name: str,
        found: _Found,
        graph: NetworkGraph,
        partitions: Sequence[NetworkPartition],
        leaves: Sequence[Tensor],
    ) -> Plan:
        """The plan of replica 0, or its error, on all drivers."""
        if name not in self._plans:
            plan: Plan | HybridError | None = None
            if self._mesh.coordinates.dp_rank == 0:
                try:
                    plan = self._make_plan(found, graph, partitions, leaves)
                except HybridError as error:
                    if self._mesh.coordinates.replicas == 1:
                        raise
                    plan = error  # the other drivers wait for this
            assert self._mesh.drivers is not None
            plan = broadcast_object(self._mesh.drivers, plan)
            if isinstance(plan, HybridError):
                raise plan
            assert plan is not None
            self._plans[name] = plan
            self._say_plan(found, plan)
        return self._plans[name]

    def _make_plan(
        self,
        found: _Found,
        graph: NetworkGraph,
        partitions: Sequence[NetworkPartition],
        leaves: Sequence[Tensor],
    ) -> Plan:
        stages = self._ranks
        if len(partitions) < stages:
            raise PlanError(
                f"{found.shown} has {_count(len(partitions), 'network partition')}, fewer than "
                f"pipeline_parallel_size={stages}. Use at most "
                f"{_count(len(partitions), 'stage')}, or name another network: "
                f"HybridGabraStrategy(network='...').{_why_not_more(graph, partitions)}"
            )
        wanted = self._how.microbatches or _microbatches(leaves, stages)
        slices = [list(leaves)]
        if wanted > 1 and not graph.is_static:
            reason = self._why_whole(found, graph, leaves, wanted)
            if reason is not None:
                self._say_whole(found, reason)
                wanted = 1
            slices = graph.split(leaves, wanted)
        make = self._how.make_plan
        try:
            return make(found.name, graph, partitions, slices[0], wanted, chosen=False)
        except NetworkError as error:
            # the user's cut points are for the network as a whole, of which this is a part
            outer = [name for name in self._opened if _inside(found.name, name)]
            if not outer:
                raise
            self._say(found, f"is cut where it divides best: {error}.")
            return make(found.name, graph, partitions, slices[0], wanted, chosen=True)

    # ------------------------------------------------------------------ what is said

    def _doing(self, found: _Found, what: str) -> None:
        self._how.progress.doing(f"{what} {found.name or 'self'!r}")

    def _say(self, found: _Found, text: str) -> None:
        if (found.name, text) not in self._said:
            self._said.add((found.name, text))
            self._how.say(f"{found.shown} {text}")

    def _say_whole(self, found: _Found, reason: str) -> None:
        self._say(
            found,
            f"takes each batch whole (num_microbatches=1): {reason}, so the numbers would depend "
            "on how the batch is split.",
        )

    def _say_again(self, found: _Found) -> None:
        reason = found.capture.reason
        if reason is None:
            return
        kind = found.name, re.sub(r"\d+", "", reason)  # a list that grows has another length now
        if kind not in self._said:
            self._said.add(kind)
            self._how.say(f"{found.shown} was captured again: {reason}")

    def _say_plan(self, found: _Found, plan: Plan) -> None:
        self._how.say(f"{found.shown}: {plan.describe()}".rstrip())
        normalised = any(isinstance(m, BatchNorm) for m in found.module.modules())
        if normalised and plan.microbatches > 1 and self._how.training:
            self._how.say(
                f"{found.shown} has batch normalisation: in training its statistics "
                f"are those of a micro-batch (1/{plan.microbatches} of a replica's batch), as in "
                "every pipeline. num_microbatches=1 gives the numbers of the whole batch, "
                "Trainer(sync_batchnorm=True) those of all replicas' micro-batches."
            )


def _here(graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
    """Compute a graph on this rank, whole."""
    code = cut_at(graph, [])[0]
    stage = Stage(code, graph.network, graph.device)
    tensors = {name: values[graph.place[node]] for node, name in graph.tensors.items()}
    leaves = graph.bind(values)
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    outputs = stage.run_with([tensors[name] for name in code.tensors], leaves, numbers)
    found = dict(zip((*graph.tensor_outputs, *graph.scalar_outputs), outputs))
    found |= zip(graph.numbers, numbers)
    return [found[n] if isinstance(n, fx.Node) else n for n in graph.outputs]


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


@contextmanager
def _named(found: _Found) -> Iterator[None]:
    """An error in here, where what was captured first runs, says of which network it is."""
    try:
        yield
    except HybridError:
        raise
    except Exception as error:
        raise NetworkError(
            f"{found.shown} was captured, but what was captured does not run by itself "
            f"({type(error).__name__}: {error}). Name the part of the model that is to be cut: "
            "HybridGabraStrategy(network='...')."
        ) from error


def _why_not_more(graph: NetworkGraph, partitions: Sequence[NetworkPartition]) -> str:
    """Where a network could not be cut, one line each; or where in its code it has weights."""
    places = [place for partition in partitions for place in partition.refused]
    lines = [f"\nIt cannot be cut before {name!r}: {reason}." for name, reason in places[:3]]
    if not lines:
        users = [layer for layer in graph.layers if layer.parameters]
        names = [f"{y.module or y.name!r} ({place_of(y.node)})" for y in users[:3]]
        lines = [f"\nIt has weights in {', '.join(names)}{', ...' * (len(users) > 3)}."]
    return "".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _layers(module: nn.Module) -> list[nn.Module]:
    """The modules that own parameters themselves."""
    return [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]


def _is_normalised(module: nn.Module) -> bool:
    return any(isinstance(m, BatchNorm) and m.training for m in module.modules())


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def _where_the_network_is(network: nn.Module, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The inputs on the network's device: before it is cut it waits on the CPU."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    return [leaf.to(device) for leaf in leaves]


def _share(module: nn.Module, parameters: Iterable[Tensor]) -> bool:
    return not {id(p) for p in module.parameters()}.isdisjoint(map(id, parameters))


def _microbatches(leaves: Sequence[Tensor], stages: int) -> int:
    """Enough to fill the pipeline twice, but no slices of one sample if that can be avoided.

    (On CPUs a convolution of a single sample takes a path that is several times slower.)
    """
    batch = next((leaf.shape[0] for leaf in leaves if leaf.dim()), 1)
    return max(1, min(2 * stages, batch // 2))
