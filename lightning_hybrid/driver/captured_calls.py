"""Calls of a captured network: through its graphs and stages, or on the driver.

A call that cannot be captured, or that uses weights in another order than the stages, runs on the
driver, with weights that are fetched for it. That is exact, and slow.

Some calls never go through the stages (:func:`why_on_driver`):

* `torch.func.functional_call(net, weights, x)` runs the code of ``net`` on tensors of the caller:
  averaged weights, those of an inner optimizer's step or of a hypernetwork. Their gradients go to
  what the caller has made them of, not to the network's own weights, and no stage has them.
* Inside of `torch.func.vmap`, ``grad``, ``jvp`` and the like, and with dual numbers, a call
  computes with tensors that cannot be sent to other ranks.
* A mode around a call (`torch.utils.flop_counter.FlopCounterMode`, a ``TorchDispatchMode`` or
  ``TorchFunctionMode`` of the user's) sees and may change each operation, but on this rank only.

Such a call runs on the driver as on one device: where it uses the network's own weights, these are
fetched, and get their gradients.

What a captured ``forward`` logs is logged when the call is over (:class:`LoggingLater`), since
``self.log`` reads the state of the loops, which cannot be captured. The arguments of ``self.log``
are appended to a list, which TorchDynamo repeats after each call, and Lightning gets them
afterwards, in their order and within the same hook.
"""

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_hybrid._torch.autograd import (
    backwards_as_ever,
    dual_level,
    functorch_level,
    in_functional_call,
    is_checkpointed,
    own_saved_tensors,
    users_mode,
)
from lightning_hybrid._torch.dynamo import without_mode
from lightning_hybrid.capture import NotCaptured
from lightning_hybrid.driver.adoption import Adoption
from lightning_hybrid.driver.found_network import FoundNetwork, indented, is_materialized
from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.driver.verification import Check, Verification
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import CannotFollow, LossOfCall, NetworkGraph, compute_whole, place_now
from lightning_hybrid.remote import NoMemory, RemoteKind, watched
from lightning_hybrid.stage import Synchronised


def why_on_driver() -> str | None:
    """Why the call that is made now must run on the driver, whole.

    Returns:
        A predicate of the called module; ``None``: stages may compute the call.
    """
    if functorch_level() or dual_level() >= 0:
        return "is called inside of a transform of functions (torch.func.vmap, grad, jvp, ...)"
    mode = users_mode()
    if mode is not None:
        return f"is called inside of a mode that sees each operation ({type(mode).__name__})"
    if in_functional_call():
        return "is called by torch.func.functional_call, which gives it weights"
    if _is_traced():
        return "is called by torch.jit.trace or torch.export"
    return None


def _is_traced() -> bool:
    """Whether the call that is made now is recorded, to be run elsewhere."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return tracing or torch.compiler.is_exporting()


class LoggingLater:
    """Delays the calls of ``self.log`` and ``self.log_dict`` in a ``forward`` until it is over.

    Args:
        module: the LightningModule. Of another module, under Fabric, nothing is delayed.
    """

    def __init__(self, module: nn.Module) -> None:
        kept: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

        def log(*args: Any, **kwargs: Any) -> None:
            kept.append(("log", args, kwargs))

        def log_dict(*args: Any, **kwargs: Any) -> None:
            kept.append(("log_dict", args, kwargs))

        self._module = module
        self._kept = kept
        # (the same functions in all calls: TorchDynamo's guards compare their identities)
        self._instead: dict[str, Callable[..., None]] = {}
        # only of a LightningModule: in another module, under Fabric, these names are the user's own
        if isinstance(getattr(type(module), "trainer", None), property):
            self._instead = {"log": log, "log_dict": log_dict}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, ``self.log`` and ``self.log_dict`` of the module only record their arguments.

        The calls are made at the end, in their order; after an error inside they are dropped.
        """
        own = {name: vars(self._module).get(name) for name in self._instead}
        vars(self._module).update(self._instead)
        try:
            yield
            calls = self._kept.copy()
        finally:
            self._kept.clear()
            for name, value in own.items():
                del vars(self._module)[name]
                if value is not None:
                    vars(self._module)[name] = value
        for name, args, kwargs in calls:
            getattr(self._module, name)(*args, **kwargs)


Adopt = Callable[[FoundNetwork, NetworkGraph, Sequence[Any]], NetworkCall | None]
"""Takes a network, a captured graph of it and the arguments of the graph, and cuts the network.
Returns what calls its stages; ``None``: it was not cut, and the driver computes the graph."""


@dataclass(frozen=True)
class _Running:
    """A call of a network that is under way.

    Attributes:
        statistics: the mode around the call that computes batch statistics over all replicas, if
            there is one; entered where the driver computes layers.
        check: what compares the call with the network's own Python, if this call is checked.
    """

    statistics: AbstractContextManager[Any]
    check: Check | None


_CAPTURING = (
    f"{Path(torch.__file__).parent / '_dynamo'}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
)


def _failed_in_first_graph(error: CannotFollow) -> bool:
    """Whether a chain of graphs has failed in its first graph, so that nothing of it has run.

    The traceback tells. The first graph is called by the `forward` that was captured, whose effects
    come after the graph. If Python between graphs has run, there are more frames: of functions that
    it calls, or of the code that TorchDynamo makes of what follows a graph.

    Args:
        error: what the chain has raised.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return sum(not file.startswith(_CAPTURING) for file in files) <= 1


class CapturedCalls:
    """Calls of the networks of one LightningModule, on a driver.

    Args:
        module: the LightningModule.
        adoption: gives ranks their stages of further graphs of a network that is cut.
        adopt: cuts a network at its first graph; see `Adopt`.
    """

    def __init__(self, module: nn.Module, adoption: Adoption, adopt: Adopt) -> None:
        self._driver = adoption.driver
        self._adoption = adoption
        self._adopt = adopt
        self._options = adoption.options
        self._announcements = adoption.announcements
        self._logging_later = LoggingLater(module)
        self._verification = Verification(
            module, self._driver, self._options.verify, self._announcements
        )
        self._running = _Running(nullcontext(), None)

    def call(
        self, found: FoundNetwork, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Make a call of a network that has been captured before, through its stages if possible.

        Else the call runs on the driver, with weights that are fetched for it, and the user is
        told why.

        Args:
            found: the network.
            arguments: positional arguments of the call.
            keywords: keyword arguments of the call.

        Returns:
            What the network's ``forward`` returns.

        Raises:
            NetworkError: the call can neither be captured nor run on the driver; or it is traced.
        """
        if _is_traced():
            raise NetworkError(
                f"{found.shown} is traced or exported ({place_now()}) while several ranks have "
                "its weights. Trace a copy, which has all of them: copy.deepcopy(module); or do it "
                "after the run."
            )
        # (where it uses weights of other ranks, their proxies fetch them)
        if why_on_driver() is not None:
            return found.forward(*arguments, **keywords)
        try:
            return self.captured(found, arguments, keywords)
        except NotCaptured as error:
            reason = f"it cannot be captured as one graph:\n{indented(error.reason)}"
            if error.only_in_this_mode and torch.is_grad_enabled():
                # (nor can it run on the driver: torch computes something else if weights are of a
                # class of their own, and here those of other ranks are proxies)
                raise NetworkError(
                    f"{found.shown} cannot be called in this way: {error.reason}."
                ) from error
        except CannotFollow as error:
            reason = str(error)
        if not is_materialized(found.module):
            raise NetworkError(
                f"{found.shown} cannot be called in this way. It is made in configure_model, and "
                f"whole on no rank, so that the driver cannot run it alone; and {reason}\n"
                "Its first call says where stages are cut: if that was a validation before "
                "training, num_sanity_val_steps=0 lets a training step say it."
            )
        self._announcements.say(
            found,
            "runs on the driver in some calls, on whole batches and on weights that are fetched "
            "for each of them, since " + reason,
        )
        remote = self._driver.remote
        remote.adopt_replaced()
        # on the whole batch, so that its Python and its hooks run once
        with self._driver.calls.one_stream(), self._weights_at_hand(found):
            result = found.forward(*arguments, **keywords)
        remote.adopt_replaced()  # (buffers that the call itself has replaced)
        return result

    def _weights_at_hand(self, found: FoundNetwork) -> AbstractContextManager[None]:
        """Where gradients are disabled: inside, a network's parameters are ordinary tensors here.

        Where they are enabled, nothing is changed. (Some code of torch decides by the class of
        tensors, and takes another path for proxies.)
        """
        if torch.is_grad_enabled():
            return nullcontext()
        remote, prefix = self._driver.remote, f"{found.name}." if found.name else ""
        names = remote.names(RemoteKind.PARAMETER)
        return remote.at_hand([name for name in names if name.startswith(prefix)])

    def captured(
        self,
        found: FoundNetwork,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """Make a call of a network through TorchDynamo, which calls :meth:`run` for each graph.

        If the call is to be verified, what it returns is compared with what the network's own
        Python returns. What the ``forward`` logs is logged at the end.

        Args:
            found: the network.
            arguments: positional arguments of the call.
            keywords: keyword arguments of the call.

        Returns:
            What the network's ``forward`` returns.

        Raises:
            NotCaptured: TorchDynamo cannot follow the call, and nothing of it has run.
            CannotFollow: a new graph uses weights in another order than the stages that own them,
                and nothing of the call has run.
            NetworkError: a part of a chain of graphs cannot be captured, or run in stages; the call
                is inside of activation checkpointing; or its stages compute something else than its
                Python.
        """
        if torch.is_grad_enabled() and is_checkpointed():
            raise NetworkError(
                f"{found.shown} is called inside of activation checkpointing ({place_now()}), "
                "which would run all of its stages again in the backward. Leave "
                "torch.utils.checkpoint out of this call: checkpoint parts of the network inside "
                "of its forward, or give the strategy recompute=True."
            )
        check = self._verification.begin(found, arguments, keywords)
        remote = self._driver.remote
        with ExitStack() as stack:
            stack.enter_context(self._logging_later())
            if not found.driven:
                self._options.progress.begin(f"capturing {found.name or 'self'!r}")
                stack.callback(self._options.progress.over)
            mode = stack.enter_context(without_mode(Synchronised))
            # (a hook of the network may call another network in the middle of this call)
            stack.callback(setattr, self, "_running", self._running)
            self._running = _Running(mode or nullcontext(), check)
            # saved-tensor hooks of the code around the call are not for what stages save
            stack.enter_context(own_saved_tensors())
            # (checks in here run backward passes that are not the user's)
            stack.enter_context(backwards_as_ever())
            # TorchDynamo cannot follow proxies, whose class intercepts operations
            stack.enter_context(remote.suspended())
            if found.hollow.needed:
                stack.enter_context(found.hollow)
            if found.whole:
                result = found.capture(arguments, keywords)
            else:
                # the graphs and the Python between them draw from the same generators
                stack.enter_context(self._driver.calls.one_stream())
                if check is not None:
                    with found.hollow.lifted():
                        check.begin_chain()
                result = self._chain(found, arguments, keywords)
            if check is not None:
                with found.hollow.lifted():
                    check.compare(result)
            return result

    def _chain(
        self, found: FoundNetwork, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Call a network that is a chain of graphs, with Python between them.

        For the arguments and what is returned see :meth:`captured`.

        Raises:
            NetworkError: Python between two graphs computes with a weight of another rank, or a
                part cannot be captured, or run in stages.
            CannotFollow: see :meth:`captured`.
        """
        try:
            with ExitStack() as found.between:
                found.read_between.clear()
                found.between.enter_context(self._between(found))
                return found.capture(arguments, keywords)
        except NoMemory as error:
            raise NetworkError(
                f"{found.shown} was captured as several graphs, and the Python between two of them "
                f"computes with a weight that a stage on another rank owns: {error}. Compute with "
                "it inside a module, or let the network be one graph. It is none because of\n"
                f"{found.reason}"
            ) from error
        except CannotFollow as error:
            if not torch.is_grad_enabled() and _failed_in_first_graph(error):
                raise  # an evaluation of which nothing has run
            raise NetworkError(
                f"{found.shown} was captured as several graphs, and one that was not among them "
                f"when it was cut does not go with its stages: {error}. Compute before the fit "
                "what does not need the input, or let the network be one graph. It is none "
                f"because of\n{found.reason}"
            ) from error
        except NotCaptured as error:  # parts of it may have run
            raise NetworkError(
                f"{found.shown} cannot be captured:\n{indented(error.reason)}\n{error.advice}"
            ) from error

    def _between(self, found: FoundNetwork) -> AbstractContextManager[None]:
        """Make the context that is entered around the Python between two graphs of a chain.

        Once the chain has stages, a read of a weight of another rank raises an error inside; before
        that, names of the weights that are read are added to ``found.read_between``.
        """
        if found.driven:
            return self._driver.remote.unreadable()
        prefix = f"{found.name}." if found.name else ""
        named = (*found.module.named_parameters(), *found.module.named_buffers())
        tensors = {prefix + name: tensor for name, tensor in named}
        return watched(tensors, found.read_between, found.hollow.shown_of(tensors))

    def run(
        self,
        found: FoundNetwork,
        graph: NetworkGraph,
        values: Sequence[Any],
        loss: LossOfCall | None = None,
    ) -> Sequence[Any]:
        """Compute a captured graph, through its stages or on the driver. TorchDynamo calls this.

        A graph that has no stages yet is cut first, if possible.

        Args:
            found: the network.
            graph: the captured graph: the whole network, or one graph of a chain.
            values: the arguments of the graph.
            loss: the loss of the call, if each micro-batch has a share of it; it gets its value
                where backwards run inside of the call.

        Returns:
            What the graph returns.

        Raises:
            CannotFollow: the graph is a new one of a network that is cut, and does not go with its
                stages.
            HybridError: the graph cannot be cut as asked.
            NoMemory: see :meth:`_in_graph`.
        """
        running = self._running
        hollow = found.hollow
        with self._in_graph(found), hollow.lifted() if hollow.needed else nullcontext():
            call = found.calls.get(graph)
            known = found.network_of(graph) if call is None else None
            if known is not None:
                call = self._adoption.add(found, known, graph, values)
            elif call is None:
                call = self._adopt(found, graph, values)
                hollow.needed = True  # (the cut leaves tensors to workers that were here before)
                self._announcements.doing(found, "calling")
            if call is not None:
                if running.check is not None and found.whole:
                    synchronised = isinstance(running.statistics, Synchronised)
                    running.check.begin(call, values, synchronised=synchronised)
                return call(values, loss, keep=running.check is not None)
            self._driver.have_here(found.module, whole=True)
            with running.statistics:
                return compute_whole(graph, values)

    @contextmanager
    def _in_graph(self, found: FoundNetwork) -> Iterator[None]:
        """Inside, a graph of a chain is computed, out of the context of :meth:`_between`.

        For a network of one graph nothing is done.

        Raises:
            NoMemory: at the end: the Python before the graph has computed with a weight that a
                worker owns now (the cut of this graph may have given it to the worker).
        """
        if found.whole:
            yield
            return
        found.between.close()
        try:
            yield
        finally:
            found.between.enter_context(self._between(found))
        if used := sorted(found.read_between & self._driver.remote.names()):
            raise NoMemory(f"it needs the numbers of {used[0]!r}")
