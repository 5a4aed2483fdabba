"""The first calls of modules: which of them are networks, and how these get their stages.

A network is captured in its first call, with real inputs. In that call (in a fit: the first call
with gradients) it is also planned, cut and checked (:mod:`lightning_hybrid.driver.adoption`); then
this call, like every later one, runs through the pipeline
(:class:`lightning_hybrid.driver.network_call.NetworkCall`).

A module whose Python cannot be captured as one graph (it prints, or branches on values) runs its
own Python on the driver, and the modules that it calls are treated in the same way; if none of them
is large enough, it becomes a chain of graphs, of which the large ones are cut. Later calls, and
calls on other weights than the network's own, are handled by
:mod:`lightning_hybrid.driver.captured_calls`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.modules import drop_hooks, has_backward_hooks
from lightning_hybrid._torch.tensors import as_they_are, gradient_hooks
from lightning_hybrid.capture import (
    Capture,
    NotCaptured,
    candidates,
    is_watched,
    kind_of,
    own_forward,
    unwatch,
    watch,
)
from lightning_hybrid.comm import Mesh
from lightning_hybrid.driver.adoption import Adoption, why_not_cut
from lightning_hybrid.driver.captured_calls import CapturedCalls, why_on_driver
from lightning_hybrid.driver.driver import Driver
from lightning_hybrid.driver.found_network import (
    FoundNetwork,
    ModuleState,
    WatchedModule,
    count,
    indented,
    inside,
    is_materialized,
    modules_with_parameters,
)
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.driver.weight_hooks import is_of_the_user
from lightning_hybrid.errors import NetworkError, NetworkNotFoundError, PlanError
from lightning_hybrid.graph import (
    NetworkGraph,
    NetworkPartition,
    compiled,
    network_partitions,
    place_now,
)
from lightning_hybrid.planning import Plan
from lightning_hybrid.remote import Hollow
from lightning_hybrid.stage import tensors_of


class Discovery:
    """Finds the networks of one LightningModule during one run, on a driver, and has them cut.

    Until :meth:`close` it intercepts calls of modules that are possibly networks: in a run that
    trains from its making on, in another one from :meth:`begin` on.

    Args:
        module: the LightningModule.
        driver: the driver of this replica.
        mesh: the process groups and channels of this rank.
        options: how networks are found and cut.
        plans: plans of networks that were found in earlier runs, by name; new ones are added.

    Raises:
        NetworkNotFoundError: the LightningModule has no module of a name that the user has given.
    """

    def __init__(
        self,
        module: nn.Module,
        driver: Driver,
        mesh: Mesh,
        options: DriverOptions,
        plans: dict[str, Plan],
    ) -> None:
        self._module = module
        self._driver = driver
        self._options = options
        self._adoption = Adoption(driver, mesh, options, plans)
        self._announcements = self._adoption.announcements
        # (not the tensors that a hook has made on this rank alone)
        tensors = tensors_of(module)
        names = tensors.keys() if options.shared is None else options.shared
        self._shared = {name: kind_of(tensors[name]) for name in names}
        self._hooks = _hooks_of(module)
        self._parameters = dict(module.named_parameters())
        self._calls = CapturedCalls(module, self._adoption, self._adopt)
        self._watched: dict[str, WatchedModule] = {}
        self._captures: list[Capture] = []
        self._ranks = mesh.coordinates.ranks_per_replica
        wanted = self._ranks > 1 or options.stages.compiled
        # (an evaluation may have no network, as one that computes metrics of files)
        evaluates = not options.trains and options.names is None
        if wanted and not (evaluates and next(module.parameters(), None) is None):
            found = candidates(module, options.names)
            self._watched = {
                name: WatchedModule(name, candidate) for name, candidate in found.items()
            }
        if options.trains:
            self.begin()

    def begin(self) -> None:
        """Intercept calls from now on.

        In an evaluation the loop calls this as it begins. What is called before, possibly on one
        driver alone (by a logger that draws the graph), runs on the driver and cuts nothing.
        """
        self._watch(self._watched.values())

    @property
    def found(self) -> bool:
        """Whether the search is over: a network was cut (or kept, with automatic sizes).

        It is True also if no network is looked for.
        """
        enough = (
            (ModuleState.CUT, ModuleState.KEPT) if self._options.automatic else (ModuleState.CUT,)
        )
        return self._any(*enough) or not self._watched

    def _any(self, *states: ModuleState) -> bool:
        """Whether at least one module is in one of these states."""
        return any(watched.state in states for watched in self._watched.values())

    @property
    def _opened(self) -> list[str]:
        """Names of the modules whose capture as one graph has failed.

        They are opened (their own Python runs), or cut as chains of graphs.
        """
        return [watched.name for watched in self._watched.values() if watched.several]

    def require(self) -> None:
        """After the first training step: refuse to go on if it has called no network to cut.

        With automatic sizes, networks that cannot be cut are kept on the driver instead. If there
        are such networks alone, the driver is told that none will be cut.

        Raises:
            NetworkNotFoundError: no watched module was called, or none of them can be cut.
        """
        if self._options.automatic and not self.found:
            for watched in self._watched.values():
                if watched.state is ModuleState.ASIDE:
                    self._keep(watched, watched.reason)
        if not self.found:
            self._refuse()
        if not self._any(ModuleState.CUT) and self._any(ModuleState.KEPT):
            self._driver.note_no_cut()

    def _refuse(self) -> None:
        """Raise NetworkNotFoundError, which says for each called module why it was not cut."""
        everything = [*self._watched.values()]
        told = [
            (watched, f"cannot be captured as one graph:\n{watched.several}")
            for watched in everything
            if watched.several
        ]
        for state in (ModuleState.EARLY, ModuleState.ASIDE, ModuleState.KEPT):
            told += [(w, w.reason) for w in everything if w.state is state]
        reasons = [f"{watched.name or 'self'!r} {reason}" for watched, reason in told]
        names = self._options.names
        named = "" if names is None else f" named {' or '.join(map(repr, names))}"
        step = f"the first training step of {type(self._module).__name__}"
        instead = "name another one (the strategy's network='...'); or use strategy='ddp'."
        if not reasons:
            what = named or " with parameters"
            raise NetworkNotFoundError(
                f"No call of a module{what} was seen in {step}, so there is nothing to cut into "
                f"{self._ranks} stages. Call the network in that step, as a module (self(x), "
                f"self.net(x)), not by its weights; {instead}"
            )
        cause = " ".join(reasons[0].split())
        apart = self._called_apart(told[0][0].name)
        hint = f" {told[0][0].name!r} {apart}." if apart else ""
        raise NetworkNotFoundError(
            f"{cause}; and no other call of a module{named} that can be cut into {self._ranks} "
            f"stages was seen in {step}. Change that; {instead}{hint}"
            + "".join(f"\n{reason}" for reason in reasons[1:])
        )

    def changed(self) -> str:
        """Find a change of the module since the run began, because of which it cannot be cut anew.

        The session asks before it cuts the networks at other places. Parameters that were replaced,
        and hooks on gradients that were added or removed, are seen.

        Returns:
            The first such change that is found, as a clause; empty: nothing has changed.
        """
        now = dict(self._module.named_parameters())
        for name in sorted(now.keys() | self._parameters.keys()):
            if now.get(name) is not self._parameters.get(name):
                return f"{name!r} is another parameter than at the beginning of the run"
        for name in self._with_other_hooks():
            return f"the hooks of {name!r} are others than at the beginning of the run"
        return ""

    def _with_other_hooks(self) -> list[str]:
        """Names of the parameters whose gradient hooks of the user have changed in this run."""
        now = _hooks_of(self._module)
        return sorted(n for n in now.keys() & self._hooks.keys() if now[n] != self._hooks[n])

    def close(self) -> None:
        """Let every module run its own ``forward`` again, and drop the captured graphs."""
        for watched in self._watched.values():
            unwatch(watched.module)
        for capture in self._captures:
            capture.close()

    # ------------------------------------------------------------------ the first call of a module

    def _called(
        self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Handle a call of a watched module, outside of calls of other watched modules.

        If a network inside of the module is cut already, the module's own Python runs, which calls
        the network. Else see :meth:`_called_undecided`.

        Args:
            name: dotted name of the module in the LightningModule.
            module: the module.
            arguments: positional arguments of the call.
            keywords: keyword arguments of the call.

        Returns:
            What the call returns.
        """
        this = self._watched[name]
        if not self._is_around_a_network(module):
            return self._called_undecided(this, arguments, keywords)
        unwatch(module)  # (so that its Python runs, which calls the network)
        self._driver.have_here(module)
        try:
            return own_forward(module)(*arguments, **keywords)
        finally:
            self._watch([this])

    def _called_undecided(
        self, this: WatchedModule, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Make a call of a module that is not yet cut, kept or opened (see `ModuleState`).

        If this call can, it decides which of these the module becomes. If the call is captured as
        one graph, that graph is cut; a module whose graph cannot be cut is kept on the driver. If
        it is not captured as one graph, the module is opened: its Python runs here, and the modules
        that it calls are looked at instead. If none of these is large enough, the module is cut as
        a chain of graphs.

        A call that stages cannot compute, or that comes before the module may be cut, runs on the
        driver and decides nothing. With one rank nothing is cut: the module is only compiled.

        Args:
            this: the module.
            arguments: positional arguments of the call.
            keywords: keyword arguments of the call.

        Returns:
            What the call returns.

        Raises:
            HybridError: the module cannot be cut as asked.
        """
        module = this.module
        # (a module that several networks share is watched under one of its names only)
        parts = set(map(id, module.modules()))
        everything = self._watched.values()
        inner = [w for w in everything if inside(w.name, this.name) or id(w.module) in parts]
        watched = [w for w in inner if is_watched(w.module)]
        # a module that it calls is from here on a part of this network, not one of its own
        for candidate in inner:
            unwatch(candidate.module)
        forward = own_forward(module)
        call = partial(forward, *arguments, **keywords)
        # with one rank nothing is cut or captured
        if self._ranks == 1:
            this.put(ModuleState.CUT)
            run = compiled(forward)
            watch(module, this.name, lambda n, m, a, k: run(*a, **k))
            return run(*arguments, **keywords)
        if (aside := why_on_driver()) is not None:
            return self._call_aside(this, ModuleState.ASIDE, aside, watched, call)
        if self._is_too_early(module):
            early = (
                f"was called without gradients only ({place_now()}), as re-entrant activation "
                "checkpointing around it does: give the strategy recompute=True instead"
            )
            return self._call_aside(this, ModuleState.EARLY, early, watched, call)
        this.put(ModuleState.UNSEEN)
        if self._keep_without_capture(this):
            return call()
        found = self._prepare(this, forward, whole=True)
        outer = this.name.rpartition(".")[0]
        called = [w for w in everything if w.state is not ModuleState.UNSEEN]
        beside = [w for w in called if w.name.rpartition(".")[0] == outer]
        if len(beside) == 1 and (apart := self._called_apart(this.name)):  # said with the second
            self._announcements.say(found, f"{apart}.")
        try:
            return self._calls.captured(found, arguments, keywords)
        # (nothing of the call has run by then, so it can be made in another way)
        except NotCaptured as error:
            reason = error.reason
            if error.only_in_this_mode:
                aside = f"is not captured in its first calls: {reason}"
                return self._call_aside(this, ModuleState.ASIDE, aside, watched, call)
        this.several = indented(_hooks_first(module, reason))
        inner.remove(this)
        if any(len(modules_with_parameters(part.module)) >= self._ranks for part in inner):
            self._open(this, found, inner)
            return _in_parts(found, this.several, call)
        found = self._prepare(this, forward, whole=False)
        self._announcements.becomes_several_graphs(found)
        return self._calls.captured(found, arguments, keywords)

    def _called_apart(self, name: str) -> str:
        """Advice for the user if parts of a module are called in its place (``self.net[:4](x)``).

        Args:
            name: dotted name of the part that is called.

        Returns:
            A predicate of the part; empty: the module around it calls it, or it is in no module but
            the LightningModule.
        """
        outer = name.rpartition(".")[0]
        if not outer or any(inside(name, opened) for opened in self._opened):
            return ""
        kind = type(self._module.get_submodule(outer))
        has_call = kind.forward is not nn.Module.forward
        instead = f"self.{outer}(...)" if has_call else "a module that calls all of them"
        return (
            f"is one of several parts of {outer!r} that are called one by one, so each is cut by "
            f"itself (a slice, self.{outer}[:4](x), calls each layer so). To have them cut as one "
            f"network, call {instead}"
        )

    def _is_around_a_network(self, module: nn.Module) -> bool:
        """Whether a submodule of a module is cut already.

        For example, ``training_step`` calls ``self.net(x)``, and ``validation_step`` ``self(x)``.
        The outer module is not cut too, since two networks would then own the same weights.
        """
        parts = set(map(id, module.modules())) - {id(module)}
        cut = (w.module for w in self._watched.values() if w.state is ModuleState.CUT)
        return any(id(part) in parts for part in cut)

    def _is_too_early(self, module: nn.Module) -> bool:
        """Whether the call that is made now comes too early for the module to be cut.

        That is a call without gradients in a run that trains, as in a validation before training:
        it possibly uses other layers, or one sample. Such a call runs on the driver, which needs
        the whole module for it. A module with deferred tensors is whole on no rank, so that no call
        of it is too early: its first call cuts it.
        """
        return self._options.trains and not torch.is_grad_enabled() and is_materialized(module)

    def _watch_calls(self, found: FoundNetwork) -> None:
        """Have later calls of a network go to `CapturedCalls.call`, and no more to this object."""
        watch(found.module, found.name, lambda n, m, a, k: self._calls.call(found, a, k))

    def _call_aside(
        self,
        this: WatchedModule,
        state: ModuleState,
        reason: str,
        watched: Sequence[WatchedModule],
        call: Callable[[], Any],
    ) -> Any:
        """Run a call on the driver, whole; the module may still be cut in a later call.

        Args:
            this: the module.
            state: the state that the module gets.
            reason: why the module is not cut in this call, as a predicate.
            watched: the modules that are watched again after the call.
            call: makes the call.

        Returns:
            What the call returns.
        """
        this.put(state, reason)
        self._driver.have_here(this.module, whole=True)
        try:
            return call()
        finally:
            self._watch(watched)

    def _keep_without_capture(self, this: WatchedModule) -> bool:
        """Keep a module on the driver if it is clear before a capture that it cannot be cut.

        That is so if TorchScript has compiled a part of it; or if the capture of another module has
        failed, and fewer modules in this one have parameters of their own than the replica has
        ranks. The call that is under way is left to the caller.

        Returns:
            Whether it was kept.
        """
        named = this.module.named_modules()
        scripted = [name for name, part in named if isinstance(part, torch.jit.ScriptModule)]
        if self._opened and len(modules_with_parameters(this.module)) < self._ranks:
            self._keep(this, "is too small for the stages", quiet=True)
            return True
        if scripted:
            self._keep(this, f"has a part that is compiled by TorchScript ({scripted[0]!r})")
        return bool(scripted)

    def _prepare(
        self, this: WatchedModule, forward: Callable[..., Any], *, whole: bool
    ) -> FoundNetwork:
        """Set up the capture of calls of a module; nothing is captured yet.

        Hooks of Lightning's profilers are taken off the module.

        Args:
            this: the module.
            forward: the module's own ``forward``.
            whole: whether it is captured as one graph; else as a chain of graphs.

        Returns:
            The module with its ``capture``, which makes a call when it is called.
        """
        name, module = this.name, this.module
        prefix = f"{name}." if name else ""
        shared = {
            full.removeprefix(prefix): kind
            for full, kind in self._shared.items()
            if full.startswith(prefix)
        }
        # hooks by which PyTorchProfiler names modules: stages run operations, not modules
        drop_hooks(module, of=("lightning.pytorch.profilers", "pytorch_lightning.profilers"))
        hollow = Hollow(module, self._driver.device)
        found = FoundNetwork(name, module, forward, hollow, whole, this.several)
        run = partial(self._calls.run, found)
        divides = self._options.microbatches != 1
        draws = not self._driver.calls.as_on_one_device
        found.capture = Capture(
            module,
            forward,
            run,
            shared,
            whole=whole,
            divides=divides,
            draws=draws,
            shares=self._options.shares,
            looks=partial(self._say_that_it_looks, found),
        )
        self._captures.append(found.capture)
        return found

    def _say_that_it_looks(self, found: FoundNetwork) -> None:
        """Show the user that a captured graph is searched for operations in which samples meet."""
        if not found.driven:  # (further graphs are captured in later calls, which show no progress)
            self._announcements.doing(found, "looking whether samples meet in")

    def _open(
        self, this: WatchedModule, found: FoundNetwork, parts: Sequence[WatchedModule]
    ) -> None:
        """Let a module run its own Python from here on, and watch the modules inside of it.

        The call that is under way is left to the caller.

        Args:
            this: the module.
            found: the same module, for the line that tells the user.
            parts: the modules inside of it.
        """
        this.put(ModuleState.OPENED)
        self._driver.have_here(this.module)
        self._announcements.runs_its_own_python(found, this.several)
        self._watch(parts)

    def _watch(self, modules: Iterable[WatchedModule]) -> None:
        for watched in modules:
            watch(watched.module, watched.name, self._called)

    def _mark_graph_kept(self, name: str, reason: str) -> None:
        """One graph of a chain is computed on the driver: mark its network as kept, with a reason.

        A network of which another graph is cut already is not marked; a later cut replaces the
        mark.

        Args:
            name: dotted name of the network.
            reason: why the graph is not cut, as a predicate.
        """
        if self._watched[name].state not in (ModuleState.KEPT, ModuleState.CUT):
            self._watched[name].put(ModuleState.KEPT, reason)

    def _keep(self, this: WatchedModule, reason: str, *, quiet: bool = False) -> None:
        """Keep a network whole on the driver for the run, and watch its calls no more.

        The replicas average its gradients.

        Args:
            this: the network.
            reason: why it is not cut, as a predicate.
            quiet: whether the user is not told so. (Nor is the user told once the capture of a
                module as one graph has failed, which was said.)
        """
        if not quiet and not self._opened:
            alone = not self._others_can_be_cut(this.name)
            self._announcements.stays(this.name, this.module, reason, alone=alone)
        this.put(ModuleState.KEPT, reason)
        self._driver.keep(this.module)
        unwatch(this.module)

    # ------------------------------------------------------------------ a new graph

    def _adopt(
        self, found: FoundNetwork, graph: NetworkGraph, values: Sequence[Any]
    ) -> NetworkCall | None:
        """Plan, cut and check a newly captured graph, or leave it on the driver.

        A network that is cut has its later calls go through its capture; one that is captured as
        one graph, and not cut, is kept.

        Args:
            found: the network of the graph.
            graph: the captured graph.
            values: the arguments of the graph in this call.

        Returns:
            What calls its stages; ``None``: the driver computes the graph.

        Raises:
            HybridError: the graph cannot be cut as asked.
        """
        name = found.name
        refusal = why_not_cut(graph)
        partitions = self._partitions(found, graph)
        if refusal is None and len(partitions) < self._ranks:
            few = count(len(partitions), "network partition")
            few = f"has {few}, fewer than {self._ranks} stages"
            if self._may_stay(name):
                refusal = few
            elif apart := self._called_apart(name):
                raise PlanError(f"{found.shown} {few}. It {apart}.")
        if refusal is not None:
            if found.whole:
                self._keep(self._watched[name], refusal)
            else:
                self._mark_graph_kept(name, refusal)
            return None
        # (the user's cut points may be meant for a module that contains this one)
        is_part = any(inside(name, outer) for outer in self._opened)
        call = self._adoption.adopt(found, graph, partitions, values, is_part=is_part)
        self._watched[name].put(ModuleState.CUT)
        if found.whole:  # (a submodule that it does not use may be called by itself)
            owned = call.network.tensors()
            inner = (w for n, w in self._watched.items() if inside(n, name) and n != name)
            self._watch(w for w in inner if not _shares(w.module, owned))
        self._watch_calls(found)
        return call

    def _partitions(self, found: FoundNetwork, graph: NetworkGraph) -> tuple[NetworkPartition, ...]:
        """Find the network partitions of a graph, between which it can be cut.

        If an evaluation cuts a network that is whole on no rank, training must be able to use the
        same cuts. Training possibly checkpoints whole blocks of layers, so that blocks are then not
        divided, if there are enough of them.
        """
        evaluates = not (torch.is_grad_enabled() or is_materialized(found.module))
        if evaluates and not self._options.cut_by_user:
            partitions = network_partitions(graph, whole_blocks=True)
            if len(partitions) >= self._ranks:
                return partitions
        return network_partitions(graph)

    def _may_stay(self, name: str) -> bool:
        """Whether a network may stay on the driver if it has fewer partitions than needed.

        It may if the user has asked for no number of stages, in a run that does not train, if the
        capture of a module as one graph has failed, or if another network can be cut.

        Args:
            name: dotted name of the network.
        """
        options = self._options
        asked = options.trains and not options.automatic
        return not asked or bool(self._opened) or self._others_can_be_cut(name)

    def _others_can_be_cut(self, name: str) -> bool:
        """Whether a network is cut, or one that is neither around nor inside of ``name`` may be.

        If not, a network that stays whole leaves the other ranks of the replica without a stage:
        the user is told ("as under ddp"), or it is an error if a number of stages was asked for.
        One may be cut if at least as many of its modules have parameters of their own as the
        replica has ranks.

        Args:
            name: dotted name of the network that stays whole.
        """
        return self._any(ModuleState.CUT) or any(
            len(modules_with_parameters(other.module)) >= self._ranks
            for other in self._watched.values()
            if not inside(other.name, name) and not inside(name, other.name)
        )


def _in_parts(found: FoundNetwork, reason: str, call: Callable[[], Any]) -> Any:
    """Make the first call of a network that is opened (its Python runs, its parts are cut).

    Args:
        found: the network.
        reason: why it cannot be captured as one graph.
        call: makes the call.

    Returns:
        What the call returns.

    Raises:
        NetworkError: a part of it fails; the message begins with ``reason``.
    """
    try:
        return call()
    except NetworkError as error:
        if reason.strip() in str(error):
            raise
        raise type(error)(
            f"{found.shown} cannot be captured as one graph: {reason.strip()}\n"
            f"So the modules that it calls are looked at one by one, and that fails:\n{error}"
        ) from error


def _hooks_first(module: nn.Module, reason: str) -> str:
    """Add to the reason of a failed capture that a part of a module has a full backward hook.

    Such a hook prevents a capture, which the reason does not tell.

    Args:
        module: the module whose capture has failed.
        reason: why, in the words of TorchDynamo.

    Returns:
        The reason, below a line that names the first part with such a hook, if there is one.
    """
    hooked = [n or "itself" for n, m in module.named_modules() if has_backward_hooks(m)]
    return f"{hooked[0]!r} has a full backward hook\n{reason}" if hooked else reason


def _hooks_of(module: nn.Module) -> dict[str, list[Any]]:
    """The user's hooks on gradients, by name of the parameter."""
    with as_they_are():
        named = {name: gradient_hooks(p) for name, p in module.named_parameters()}
    return {name: [hook for hook in hooks if is_of_the_user(hook)] for name, hooks in named.items()}


def _shares(module: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Whether a parameter of a module is one of these tensors."""
    return not {id(p) for p in module.parameters()}.isdisjoint(map(id, tensors))
