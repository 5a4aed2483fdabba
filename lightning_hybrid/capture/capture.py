"""Capture a network by TorchDynamo, the front end of ``torch.compile``.

In each call TorchDynamo checks, in microseconds, whether a value that its graph depends on has
changed (and captures again if so). It then calls the function that :meth:`Capture._take` has
returned with the graph's inputs, and repeats the side effects of the Python (on attributes, lists,
hooks). Every tensor that leaves the network in any way is an output of the graph.

First a network is captured as one graph or not at all: if TorchDynamo cannot follow, `Capture`
raises before anything has run, and the caller can do otherwise (see
:mod:`lightning_hybrid.driver.discovery`).

Models of `transformers` that can return the hidden states or the router's logits of their layers
install hooks for that in their first call, under a lock, which TorchDynamo does not follow:
`installs_hooks` installs them before the call is captured again.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_hybrid._torch.dynamo import (
    FAILED_AT_ONCE,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    capture_settings,
    forget_compiled,
    free_sizes,
    recapture_reason,
    without_mode,
)
from lightning_hybrid._torch.graphs import is_region
from lightning_hybrid._torch.modules import tables
from lightning_hybrid._torch.symbols import GuardOnDataDependentSymNode
from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.capture.dynamo_reasons import reason_in
from lightning_hybrid.capture.marked_intermediates import Marking, may_hide_marks, resolve_marks
from lightning_hybrid.capture.own_classes import in_own_classes, is_followed, plain, refused_class
from lightning_hybrid.capture.rewritten_functions import PACKS, captured_functions
from lightning_hybrid.graph import (
    Divided,
    NetworkGraph,
    describe,
    held_by,
)

_LOCK = "_hook_installation_lock"


def installs_hooks(reason: str, network: nn.Module) -> bool:
    """After a failed capture, install the hooks of `transformers` models in a network if needed.

    Some of these models install hooks in their first call, in a way that cannot be captured.

    Args:
        reason: why the call could not be captured (TorchDynamo's text).
        network: the network that was called.

    Returns:
        Whether hooks were the reason and have been installed now, so that the call can be tried
        again.
    """
    library: Any = sys.modules.get("transformers")
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if _LOCK not in reason or library is None or install is None:
        return False
    models = [m for m in network.modules() if isinstance(m, library.PreTrainedModel)]
    done = "_output_capturing_hooks_installed"
    missing = [model for model in models if not getattr(model, done, False)]
    for model in missing:
        install(model)
    return bool(missing)


RunGraph = Callable[..., Sequence[Any]]
"""A function that computes a graph: ``run(graph, values)`` or ``run(graph, values, loss)``.

``graph`` is a `NetworkGraph`; ``values`` are the arguments of the graph in this call, in order;
``loss`` is the `LossOfCall` where each micro-batch has a share of a loss. It returns the outputs of
the graph, in order.
"""


_COUNT = itertools.count()

# a warning by which TorchDynamo's look at the gradients of all tensors would reach the user
warnings.filterwarnings(
    "ignore", "The .grad attribute of a Tensor that is not a leaf", module=r"torch\._"
)

_KILLED_LOADER = re.compile(r"DataLoader worker \(pid.* (is killed by signal|exited un).*")

ShapeAndType = tuple[tuple[int, ...], torch.dtype]
"""(shape, type) of a tensor."""


def kind_of(tensor: Tensor) -> ShapeAndType:
    """Shape and type of a tensor; of a subclass too, without its own ``__torch_function__``."""
    with as_they_are():
        return tuple(tensor.shape), tensor.dtype


class NotCaptured(Exception):
    """Raised if a network's Python cannot be followed.

    Nothing of the call has happened; of a chain of graphs, earlier graphs may have run.

    If it comes from the first call of a network, ``driver/discovery.py`` tries the parts that the
    network calls, or a chain of graphs. If the chain cannot be captured either, the user reads
    `reason` and `advice` in the `NetworkError` of ``driver/captured_calls.py``. Reasons that
    TorchDynamo gives are worded in ``capture/dynamo_reasons.py``.

    Args:
        reason: why, and if possible where in the user's code, in one line without a full stop.
        only_in_this_mode: whether only the mode of this call is to blame: it is an evaluation, or
            nothing is trained. A later call in another mode may be captured, so the network should
            not be given up.
        advice: what the user can do, as a sentence with its full stop.
    """

    def __init__(
        self,
        reason: str,
        *,
        only_in_this_mode: bool = False,
        advice: str = "Name the part of the model that is to be cut: the strategy's network='...'.",
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.only_in_this_mode = only_in_this_mode
        self.advice = advice


class _OtherDimension(Exception):
    """Raised to have a capture repeated with the samples in the other one of dimensions 0 and 1.

    `Capture` catches it, before any graph has run.
    """


_ASSIGNED = (
    ". An assignment to requires_grad cannot be captured, x.requires_grad_() can; for T5 of "
    "transformers, whose blocks are checkpointed without it too, set gradient_checkpointing = "
    "False on its T5Attention modules"
)
_WITHOUT_GRADIENTS = (
    "it has trained weights under activation checkpointing with use_reentrant=True, in a region "
    "whose inputs require no gradient, so that they get none; use_reentrant=False gives them some"
)


class _LacksMarks(Exception):
    """Raised to have a capture repeated inside of :class:`Marking`.

    `Capture` catches it, before any graph has run.
    """


def _refuse_classes(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_nested:
            raise NotCaptured(
                "it takes a nested tensor, whose sizes follow from values",
                advice="Pad it (torch.nested.to_padded_tensor), and give the network a mask.",
            )
        if type(tensor) is not Tensor and (reason := refused_class(tensor)) is not None:
            raise NotCaptured(reason)


def _is_other(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that an ordinary tensor can replace; see `is_followed`."""
    return type(tensor) is not Tensor and is_followed(type(tensor))


def _refuse_inside(given: Iterable[Tensor]) -> None:
    """Refuse tensors of a subclass inside of containers, since the network may write to containers.

    Args:
        given: all tensors in a call's arguments. Those that are arguments themselves have been
            replaced by ordinary tensors, so any subclass that an ordinary tensor could replace is
            in a container.

    Raises:
        NotCaptured: a tensor is of such a subclass.
    """
    kind = next((type(tensor) for tensor in given if _is_other(tensor)), None)
    if kind is not None:
        raise NotCaptured(
            f"a list or dictionary that it takes has a {kind.__name__} inside",
            advice="Give it as an argument of its own, or as an ordinary tensor "
            "(tensor.as_subclass(torch.Tensor)).",
        )


def _refuse_optimizers(module: fx.GraphModule) -> None:
    """Refuse code that looks at an optimizer: the graph would hold its weights as constants.

    Args:
        module: the graph from TorchDynamo.

    Raises:
        NotCaptured: the graph holds a parameter as a constant.
    """
    if any(isinstance(value, nn.Parameter) for value in held_by(module).values()):
        raise NotCaptured(
            "its forward looks at an optimizer",
            advice="Hand it what it looks for (the learning rate) as an argument or attribute.",
        )


def _refuse_one_region(graph: NetworkGraph) -> None:
    """Refuse a network that is one checkpointed region: one operation, which cannot be cut.

    Raises:
        NotCaptured: one region takes all parameters.
    """
    weights = {name for name, _ in graph.network.named_parameters()}
    if any(is_region(layer.node) and layer.parameters >= weights for layer in graph.layers):
        raise NotCaptured(
            "all of it is one activation checkpoint, in which it cannot be cut",
            advice="Checkpoint its blocks one by one, or leave it to "
            "the strategy's recompute=True.",
        )


class Capture:
    """Captures the calls of one network, and has their graphs computed by ``run``.

    Args:
        network: the module.
        forward: its ``forward``, as the user has it.
        run: called in each call for its graph; see `RunGraph`. With ``shares`` it gets the loss of
            the call, if the graph has one and gradients are switched on.
        shared: shape and type of the parameters and buffers that all ranks have, by name. Others (a
            buffer that a hook has registered on this rank) are inputs of the network. ``None``: all
            that the network has now.
        whole: whether to capture it as one graph or not at all; else as a chain of graphs, with
            ordinary Python between them.
        divides: whether to divide a graph in which samples meet into prologue, heavy part and tail
            (:mod:`lightning_hybrid.graph.three_parts`); ``run`` then gets the heavy part alone.
            False where batches are not split anyway.
        draws: whether each micro-batch may draw random numbers by itself. Else (``rng="device"``) a
            graph is divided only if prologue and tail draw all of its random numbers, for the whole
            batch.
        shares: whether to look for a loss of which each micro-batch has a share, as `1f1b` needs.
        looks: called, without arguments, before this package studies a new graph, which takes long.

    Attributes:
        reason: the value in the user's code because of which the last call was captured anew;
            ``None``: it was not, or not because of such a value.
    """

    def __init__(
        self,
        network: nn.Module,
        forward: Callable[..., Any],
        run: RunGraph,
        shared: Mapping[str, ShapeAndType] | None = None,
        *,
        whole: bool = True,
        divides: bool = True,
        draws: bool = True,
        shares: bool = False,
        looks: Callable[[], None] = lambda: None,
    ) -> None:
        self._divides = divides
        self._draws = draws
        self._shares = shares
        self._looks = looks
        tensors = (*network.named_parameters(), *network.named_buffers())
        self.network = network
        self._run = run
        self._shared = {n: kind_of(t) for n, t in tensors} if shared is None else shared
        self.reason: str | None = None
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []  # the `id` of a freed tensor could be given to another
        self._buffers: list[tuple[dict[str, Any], str, str]] = []
        self._given: list[int] = []
        self._batch_dim = 0
        self._looks_behind = divides and whole and _has_time_first(network)
        self._captured = 0
        self._marking = False
        self._whole = whole

        if getattr(forward, "__func__", None) is type(network).forward:
            with captured_functions:  # (the network may be of a class with a replaced `forward`)
                forward = MethodType(type(network).forward, network)

        def call(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        # a name for each: a value that TorchDynamo has seen change (an integer that differs between
        # two networks of a class) it takes to change in all code of that name
        call.__code__ = call.__code__.replace(co_name=f"call_{next(_COUNT)}")
        self._code = call.__code__
        # each network counts its captures by itself, whatever else runs the same code
        compiler: Any = torch.compile
        self._compiled = compiler(
            call, backend=self._take, fullgraph=whole, isolate_recompiles=True
        )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the network, and return what it returns; its graph is computed by ``run``.

        Args:
            args: the positional arguments of the network's ``forward``.
            kwargs: its keyword arguments.

        Raises:
            NotCaptured: TorchDynamo cannot follow. With ``whole`` nothing of the call has happened.
            RuntimeError: a process of a data loader was killed meanwhile.
        """
        values = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        own = {id(value): value for value in values if _is_other(value)}
        if not own:
            return self._called(args, kwargs)
        stands = {number: plain(value) for number, value in own.items()}
        result = self._called(
            tuple(stands.get(id(value), value) for value in args),
            {name: stands.get(id(value), value) for name, value in kwargs.items()},
        )
        first, *_ = own.values()
        return in_own_classes(result, first, {id(stands[number]): own[number] for number in own})

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # 1. Before TorchDynamo looks: what it would fail on, and which sizes are to stay free.
        #    Without a mark it captures for the sizes of the first call, and again for others.
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        _refuse_classes(given)
        _refuse_inside(given)
        self._given = [id(tensor) for tensor in given]
        free_sizes(given, 1 + self._batch_dim)
        # 2. The call. Its guards choose a graph, or `_take` gets a new one; then the graph runs.
        try:
            marking = Marking() if self._marking else contextlib.nullcontext()
            with capture_settings(), captured_functions, marking:
                return self._compiled(*args, **kwargs)
        except _LacksMarks:
            # (nothing but the capture has happened)
            forget_compiled(self, self._code)
            self._marking = True
            self._captured = 0
            return self._called(args, kwargs)
        except _OtherDimension:
            # nothing but the capture has happened
            forget_compiled(self, self._code)
            self._batch_dim = 1 - self._batch_dim
            self._captured = 0
            self._looks_behind = self._batch_dim == 1  # once each way, and then the first again
            return self._called(args, kwargs)
        except (
            TorchDynamoException,
            FailOnRecompileLimitHit,
            GuardOnDataDependentSymNode,
        ) as error:
            # the handler of SIGCHLD raises that wherever Python is
            if killed := _KILLED_LOADER.search(str(error)):
                raise RuntimeError(killed[0]) from error
            if PACKS in str(error):
                raise NotCaptured(PACKS, only_in_this_mode=True) from error
            if installs_hooks(str(error), self.network):
                return self._called(args, kwargs)
            if "requires_grad_()" in str(error) and not self._marking:
                self._marking = True
                return self._called(args, kwargs)
            hint = _ASSIGNED if "setattr() on Tensor.requires_grad" in str(error) else ""
            raise NotCaptured(reason_in(str(error)) + hint) from error
        except AssertionError as error:
            if not str(error).startswith(FAILED_AT_ONCE):
                raise
            inference = torch.is_inference_mode_enabled()
            instead = "; under torch.no_grad, as Trainer(inference_mode=False) has it, it can be"
            hint = instead if inference else ""
            raise NotCaptured(reason_in(str(error)) + hint) from error

    def close(self) -> None:
        """Have TorchDynamo forget the network, which it would keep until the process ends."""
        forget_compiled(self, self._code)

    def _take(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """The backend of ``torch.compile``: gets each new graph, and returns what computes it.

        An error in here would lose its type, so the graph is studied when it is called first.

        Args:
            module: the new graph.

        Returns:
            A function from the arguments of the graph to its outputs. In its first call it may
            raise `NotCaptured`, or have the capture repeated.
        """
        self._captured += 1
        # TorchDynamo may call one graph with other tensors (a parameter was replaced by one of the
        # same size): if its arguments have other names, that is another `NetworkGraph`
        graphs: dict[tuple[str | None, ...], Divided] = {}
        tensors = [
            isinstance(node.meta.get("example_value"), Tensor)
            for node in module.graph.nodes
            if node.op == "placeholder"
        ]
        fresh, resolved = self._captured > 1, resolve_marks(module)
        weights: _WeightsInOrder | None = None
        lacks_marks = not self._marking and may_hide_marks(module)

        def run(*values: Any) -> Sequence[Any]:
            nonlocal fresh, weights
            if lacks_marks:
                # (when a graph before it has run, it is too late to begin the call again)
                raise _LacksMarks if self._whole else NotCaptured(_WITHOUT_GRADIENTS)
            # here, when the graph runs: when it was made it was not known to be used
            self.reason = _of_python(recapture_reason()) if fresh else None
            fresh = False
            if not self._names:
                self._learn_names()
            if weights is None or not weights.are_among(values, self._names):
                weights = _WeightsInOrder(values, self._names)
            names = self._named(values, tensors, weights)
            divided = graphs.get(names)
            if divided is None:
                _refuse_classes(value for value in values if isinstance(value, Tensor))
                _refuse_optimizers(module)
                if not resolved:
                    raise NotCaptured("it changes requires_grad of a tensor that it is given")
                divided = graphs[names] = self._divided(module, names, values)
                self._find_batch(divided.heavy, values)
            heavy = divided.heavy
            with without_mode(Marking):
                return divided(values, self._run) if heavy.divided else self._run(heavy, values)

        return run

    def _divided(
        self, module: fx.GraphModule, names: Sequence[str | None], values: Sequence[Any]
    ) -> Divided:
        self._looks()
        shared = frozenset(self._shared)
        graph = describe(module, self.network, names, self._given, values, shared, self._batch_dim)
        _refuse_one_region(graph)
        return Divided(graph, divides=self._divides, draws=self._draws, shares=self._shares)

    def _find_batch(self, graph: NetworkGraph, values: Sequence[Any]) -> None:
        """If a graph's batches cannot be split, ask to try the other dimension for the samples.

        That is done only for networks with layers that have the batch in dimension 1: once for
        dimension 1, and if that does not help, once more to come back to dimension 0.

        Args:
            graph: the new graph.
            values: its arguments in this call.

        Raises:
            _OtherDimension: the other dimension is to be tried.
        """
        looks, self._looks_behind = self._looks_behind, False
        if looks and (graph.is_static or graph.meets is not None):
            several = [v for v in values if isinstance(v, Tensor) and id(v) in self._given]
            if any(v.dim() > 1 and v.shape[1] > 1 for v in several):
                raise _OtherDimension

    def _named(
        self, values: Sequence[Any], tensors: Sequence[bool], weights: _WeightsInOrder
    ) -> tuple[str | None, ...]:
        """Per argument of a graph, the name of the parameter or buffer that it is, or ``None``.

        Args:
            values: the arguments.
            tensors: for each argument, whether it is a tensor.
            weights: parameters and buffers that are known already to be at their places in
                ``values``.
        """
        names = weights.names.copy()
        for index in weights.others:
            names[index] = self._names.get(id(values[index]))
            if names[index] is None and tensors[index]:
                names[index] = self._replaced_buffer(values[index])
        return tuple(names)

    def own(self, names: Collection[str]) -> None:
        """Set which tensors stages own; called once the network is cut.

        From here on all other parameters and buffers are inputs of the network. A parameter that
        later replaces one of ``names`` is not what the stages have, so it is an input too. (A
        buffer that replaces one is not: the stages are sent its values.)

        Args:
            names: dotted names of the parameters and buffers that stages own.
        """
        self._names = {key: name for key, name in self._names.items() if name in names}
        self._buffers = [place for place in self._buffers if place[2] in names]

    def _learn_names(self) -> None:
        """Note, by identity, which tensors are the network's parameters and buffers now.

        Only those that all ranks have are noted, in the shape and type that they have there.
        """
        everything = [*self.network.named_buffers(), *self.network.named_parameters()]
        found = [(n, value) for n, value in everything if self._shared.get(n) == kind_of(value)]
        self._names = {id(value): name for name, value in found}
        self._alive = [value for _, value in found]
        self._buffers = [
            (table, key, full)
            for name, part in self.network.named_modules()
            for table in (tables(part)[1],)
            for key in table
            if (full := f"{name}.{key}".removeprefix(".")) in self._shared
        ]

    def _replaced_buffer(self, value: Tensor) -> str | None:
        for table, key, name in self._buffers:
            if table.get(key) is value:
                return name if self._shared[name] == kind_of(value) else None
        return None


class _WeightsInOrder:
    """Which arguments of a graph are parameters and buffers, to be compared with later calls.

    In most calls they are the same objects at the same places. TorchDynamo hands a graph its
    tensors and not their names, so they are found by identity.

    Args:
        values: the arguments.
        named: names of parameters and buffers by ``id``.

    Attributes:
        names: per argument, the name of the parameter or buffer that it is; ``None``: it is
            neither.
        others: indices of the arguments that are neither.
    """

    def __init__(self, values: Sequence[Any], named: Mapping[int, str]) -> None:
        self._named = named
        self.names = [named.get(id(value)) for value in values]
        self._are_known = [name is not None for name in self.names]
        self._known = [*itertools.compress(values, self._are_known)]
        self.others = [index for index, known in enumerate(self._are_known) if not known]

    def are_among(self, values: Sequence[Any], named: Mapping[int, str]) -> bool:
        """Whether another call's arguments have the same parameters and buffers at these places.

        Args:
            values: the arguments of that call.
            named: names of parameters and buffers by ``id``: the same mapping as at first, or
                another one if names have changed, for which the answer is no.
        """
        these = itertools.compress(values, self._are_known)
        return named is self._named and all(map(is_, these, self._known))


def _has_time_first(network: nn.Module) -> bool:
    """Whether a layer of the network has the batch in dimension 1 (``batch_first = False``)."""
    return any(getattr(part, "batch_first", True) is False for part in network.modules())


_OF_MODES = ("GLOBAL_STATE", ".training ==", "requires_grad", "dispatch key", "grad_mode")
"""Words in guards on modes: each mode has a graph of its own, which users need not be told."""


def _of_python(reason: str | None) -> str | None:
    """The reason of a capture in one line, if it is a value that the user's code looks at.

    Args:
        reason: TorchDynamo's reason: the guard that has failed; ``None``: it is not known.

    Returns:
        ``None`` if the reason is only a mode (training, gradients), or not known.
    """
    if reason is None or any(word in reason for word in _OF_MODES):
        return None
    line = reason.splitlines()[0].partition(": ")[2] or reason.splitlines()[0]
    return " ".join(line.split())
