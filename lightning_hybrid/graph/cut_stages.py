"""Cut a captured network into stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_hybrid._torch.graphs import is_region
from lightning_hybrid._torch.modules import tables
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph.cuts_and_crossings import Cuts
from lightning_hybrid.graph.graph import NetworkGraph
from lightning_hybrid.graph.mode_regions import Copier
from lightning_hybrid.graph.partition import NetworkPartition
from lightning_hybrid.graph.recurrent_layers import RECURRENT
from lightning_hybrid.graph.stage_code import GraphCode
from lightning_hybrid.remote import materialize

MOST_COMPILED = 64
"""For how many input sizes a stage is compiled; for more it runs uncompiled, and torch warns."""


def compiled(code: Callable[..., Any]) -> Callable[..., Any]:
    """A stage's function under ``torch.compile``, which compiles it for each set of input sizes.

    It is compiled when it is called, for up to `MOST_COMPILED` sets.

    Random layers draw the same numbers as uncompiled, by torch's generators instead of Inductor's
    own (``fallback_random``). Sizes are fixed since for free ones Inductor cannot compile some
    networks (a 3-D max pooling before a convolution, for instance, in torch 2.13).

    All stages share one code object, by which torch counts what it has compiled; so each result
    counts its compilations by itself (``isolate_recompiles``).
    """
    return torch.compile(  # type: ignore[call-overload,no-any-return]
        code,
        dynamic=False,
        options={"fallback_random": True},
        isolate_recompiles=True,
        recompile_limit=MOST_COMPILED,
    )


@dataclass(frozen=True)
class StageCode:
    """A stage as plain data, for the rank that owns it.

    Attributes:
        code: a function of `tensors`, then what crosses the cut before the stage, then `numbers`;
            returns a list of what crosses the cut after the stage, or of what the network returns.
        tensors: dotted names, in the network, of the parameters and buffers that it takes, in
            order.
        numbers: which of `NetworkGraph.numbers` it takes, as indices.
        written: names of the parameters and buffers that it changes in place.
        layers: number of its first layer, and number of its last layer plus one.
        beside: names of further parameters and buffers of the same modules, which this graph does
            not use, but other graphs of the network may (a count of batches, in training).
        checkpointed: whether a part of it is under activation checkpointing, so that the backward
            computes it again.
    """

    code: GraphCode
    tensors: tuple[str, ...]
    numbers: tuple[int, ...]
    written: frozenset[str]
    layers: tuple[int, int]
    beside: tuple[str, ...] = ()
    checkpointed: bool = False

    @property
    def owned(self) -> tuple[str, ...]:
        """Names of all parameters and buffers that the stage's rank owns: `tensors`, `beside`."""
        return (*self.tensors, *self.beside)


class Stage:
    """The layers between two cuts, on the rank that runs them.

    The stage has no copies of parameters and buffers: each call reads those that the modules of
    ``network`` hold at that moment.

    Args:
        code: what it computes.
        network: the network, on this rank.
        device: where it runs; tensors are not moved there (see `move`).

    Attributes:
        written: names of the parameters and buffers that a call changes in place.
        layers: number of its first layer, and number of its last layer plus one.
        tensor_names: names of its parameters and buffers, as `StageCode.owned`.
        checkpointed: whether a part of it is under activation checkpointing.
        device: where it runs.
        compiled: whether calls run through ``torch.compile``.
    """

    def __init__(self, code: StageCode, network: nn.Module, device: torch.device) -> None:
        self.written = code.written
        self.layers = code.layers
        self.tensor_names = code.owned
        self._numbers = code.numbers
        self.checkpointed = code.checkpointed
        # Places (table of the module, key) and not tensors: the user's code may put another buffer
        # into its module, and the next call is to take that one.
        self._places = {name: _place(network, name) for name in code.owned}
        self._takes = code.tensors
        self._taken_from = [self._places[name] for name in code.tensors]
        self._code = code.code
        self.device = device
        self._run = code.code.function(device)
        self.compiled = False

    def compile_code(self) -> None:
        """Make later calls run through ``torch.compile``; recurrent layers stay uncompiled.

        No effect if that is so already.
        """
        if not self.compiled:
            self.compiled = True
            # (AOTAutograd fails to save what the backward of a recurrent layer needs, torch 2.13)
            self._run = compiled(self._code.function(self.device, without=RECURRENT))

    def __call__(self, values: Sequence[Any], numbers: Sequence[Any] = ()) -> list[Any]:
        """Run the layers of this stage, with the network's present parameters and buffers.

        Args:
            values: what crosses the cut before it, in order; for stage 0 the tensors of
                `NetworkGraph.bind`.
            numbers: the values of all `NetworkGraph.numbers` in this call, the same for every
                stage.

        Returns:
            What crosses the cut after it, in order; of the last stage the values of
            `NetworkGraph.tensor_outputs`, then `NetworkGraph.scalar_outputs`.
        """
        return self.run_with(self._tensors(), values, numbers)

    def run_with(
        self, tensors: Sequence[Tensor], values: Sequence[Any], numbers: Sequence[Any] = ()
    ) -> list[Any]:
        """Run the layers of this stage with given parameters and buffers.

        Args:
            tensors: the parameters and buffers, in the order of `StageCode.tensors`; for those of
                the network see `taken`.
            values: what crosses the cut before it, as in `__call__`.
            numbers: the values of all `NetworkGraph.numbers`, as in `__call__`.

        Returns:
            The same as `__call__`.
        """
        result: list[Any] = self._run(*tensors, *values, *[numbers[n] for n in self._numbers])
        return result

    def taken(self) -> dict[str, Tensor]:
        """The network's present parameters and buffers that a call takes, by name.

        They are in the order of `run_with`.
        """
        return dict(zip(self._takes, self._tensors()))

    def _tensors(self) -> list[Tensor]:
        # (for each tensor in every call: no function is called for it)
        return [table[key] for table, key in self._taken_from]

    def changed(self) -> dict[str, Tensor]:
        """The network's present parameters and buffers that a call changes in place, by name."""
        return {name: tensor for name, tensor in self.taken().items() if name in self.written}

    def _tensor(self, name: str) -> Tensor:
        table, key = self._places[name]
        tensor: Tensor = table[key]
        return tensor

    @contextmanager
    def instead(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the network holds other parameters and buffers, which calls then take.

        On exit the network holds the tensors that it held before.

        Args:
            tensors: the tensors to put into the network, by name; each name must be one of
                ``tensor_names``.
        """
        before = {name: self._tensor(name) for name in tensors}
        try:
            self._put(tensors)
            yield
        finally:
            self._put(before)

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            table, key = self._places[name]
            table[key] = tensor

    def move(self, device: torch.device | str) -> None:
        """Move the parameters (with gradients) and buffers of this stage to another device.

        These are the network's own: parameters stay the same objects, buffers are replaced in their
        modules. Deferred tensors get their numbers first.

        Raises:
            DeferredError: another rank owns one of the tensors.
        """
        named = (*self.named_parameters(), *self.named_buffers())
        materialize([tensor for _, tensor in named])
        for _, parameter in self.named_parameters():
            # (by ``data``: the optimizer has these objects)
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.to(device)
        self._put({name: buffer.to(device) for name, buffer in self.named_buffers()})

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The network's parameters among ``tensor_names``, each as (dotted name, tensor)."""
        return ((name, t) for name, t in self._named() if isinstance(t, nn.Parameter))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The network's buffers among ``tensor_names``, each as (dotted name, tensor)."""
        return ((name, t) for name, t in self._named() if not isinstance(t, nn.Parameter))

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._tensor(name)) for name in self._places)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The network's parameters among ``tensor_names``."""
        return (value for _, value in self.named_parameters())

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """The names of buffers among ``tensor_names``."""
        return tuple(name for name, _ in self.named_buffers())


def _place(network: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a network holds a parameter or buffer.

    Args:
        network: the network.
        name: dotted name of the parameter or buffer.

    Returns:
        The dictionary of parameters or of buffers of its module, and the key there.
    """
    owner, _, key = name.rpartition(".")
    parameters, buffers = tables(network.get_submodule(owner))
    return (parameters if key in parameters else buffers), key


def cut(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    boundaries: Sequence[int],
    device: torch.device | None = None,
    *,
    collects: bool = False,
) -> list[StageCode]:
    """Cut a network into stages, before the partitions numbered ``boundaries``.

    Stage 0 takes the tensors of `NetworkGraph.bind`, each later stage what the one before it
    returns; the last one returns `NetworkGraph.tensor_outputs` and then
    `NetworkGraph.scalar_outputs`. A tensor that a later stage needs passes through all stages
    between.

    Args:
        graph: the captured network.
        partitions: all partitions of it, from `network_partitions`.
        boundaries: rising numbers of the partitions with which stages 1, 2 ... begin; empty: one
            stage.
        device: the device of the capture; where the code names it, each rank puts its own. By
            default `NetworkGraph.device`.
        collects: whether to add a last stage without layers, on the driver, which collects the
            outputs. It is needed where the stage before it has copies.

    Returns:
        The stages in order.

    Raises:
        NetworkError: the boundaries are out of order or out of range, or outputs cannot be sent to
            the stage that collects them.
    """
    if list(boundaries) != sorted(set(boundaries)) or not all(
        0 < boundary < len(partitions) for boundary in boundaries
    ):
        raise NetworkError(
            f"boundaries {list(boundaries)} must rise and lie in 1..{len(partitions) - 1} "
            f"(the network has {len(partitions)} partitions)"
        )
    positions = [partitions[b].start for b in boundaries]
    return cut_at(graph, [*positions, *collecting(graph)] if collects else positions, device)


def collecting(graph: NetworkGraph) -> list[int]:
    """The position of a last stage without layers, which collects the outputs on the driver.

    Such a stage is needed where the stage before it has copies.

    Returns:
        A list with this position alone, to append to the positions for `cut_at`.

    Raises:
        NetworkError: an output cannot be sent to another rank.
    """
    end = len(graph.layers)
    if refusal := Cuts(graph).refusal(end):
        raise NetworkError(
            f"the last stage cannot have copies, which send the driver its outputs: {refusal}. "
            "Give it one copy (pipeline_parallel_size)."
        )
    return [end]


def cut_at(
    graph: NetworkGraph, positions: Sequence[int], device: torch.device | None = None
) -> list[StageCode]:
    """Cut a network into stages, before the layers numbered ``positions``; see `cut`.

    Args:
        graph: the captured network.
        positions: for stages 1, 2 ... the number of the first layer, never decreasing. It is not
            checked that cuts are allowed there.
        device: the device of the capture; where the code names it, each rank puts its own. By
            default `NetworkGraph.device`.

    Returns:
        The stages in order.
    """
    cuts = Cuts(graph)
    device = device or graph.device  # code that names it gets the device of the rank that runs it
    places = [0, *positions, len(graph.layers)]
    # what comes in, what crosses each cut, what is returned
    borders = [
        list(graph.inputs),
        *(cuts.crossing(position) for position in positions),
        [*graph.tensor_outputs, *graph.scalar_outputs],
    ]
    stages = [
        _stage(graph, layers, tensors, device)
        for layers, tensors in zip(pairwise(places), pairwise(borders))
    ]
    return _with_what_is_beside(stages, graph)


def _with_what_is_beside(stages: Sequence[StageCode], graph: NetworkGraph) -> list[StageCode]:
    """The stages again, as new objects in which `StageCode.beside` is filled in.

    A parameter or buffer that no stage takes belongs to the first stage that takes another tensor
    of the same module, or of the same `nn.ModuleDict`: its members are alternatives (adapters,
    heads of several tasks), and a later call takes another one. If no stage takes one, it belongs
    to no stage.
    """
    taken = {name for stage in stages for name in stage.tensors}
    choices = {n for n, m in graph.network.named_modules() if n and isinstance(m, nn.ModuleDict)}
    home: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name in stage.tensors:
            for module in _modules_of(name, choices):
                home.setdefault(module, number)
    beside: list[list[str]] = [[] for _ in stages]
    for name, _ in (*graph.network.named_parameters(), *graph.network.named_buffers()):
        if name in graph.shared - taken:
            for module in _modules_of(name, choices):
                if module in home:
                    beside[home[module]].append(name)
                    break
    return [replace(stage, beside=tuple(names)) for stage, names in zip(stages, beside)]


def _modules_of(name: str, choices: Collection[str]) -> list[str]:
    """The module of a tensor, and those around it of some names, the innermost first.

    Args:
        name: dotted name of the tensor.
        choices: dotted names of modules.
    """
    module = name.rpartition(".")[0]
    found = [module] if module else []
    while module := module.rpartition(".")[0]:
        if module in choices:
            found.append(module)
    return found


def make_stages(
    codes: Iterable[StageCode], network: nn.Module, device: torch.device
) -> list[Stage]:
    """Make stages that run on this rank, one for each code.

    Args:
        codes: what each stage computes.
        network: the network, on this rank, whose parameters and buffers they read.
        device: where they run.
    """
    return [Stage(code, network, device) for code in codes]


def _stage(
    graph: NetworkGraph,
    span: tuple[int, int],
    borders: tuple[Sequence[fx.Node], Sequence[fx.Node]],
    device: torch.device,
) -> StageCode:
    (start, stop), (inputs, outputs) = span, borders
    layers = graph.layers[start:stop]
    nodes = [node for layer in layers for node in (layer.node, *layer.parts)]
    # Arithmetic on sizes is copied into each stage that needs it: it costs nothing, and a number
    # that crossed a cut would have to be waited for. (A tensor that only passes through is not
    # computed here, a scalar is.)
    needs = map(graph.inputs_through_scalars, (*nodes, *filter(graph.is_scalar, outputs)))
    used = set(outputs).union(*needs)
    tensors = [node for node in graph.tensors if node in used]
    numbers = [node for node in graph.numbers if node in used]
    as_tensors = {leaf.node for leaf in graph.leaves if leaf.number}
    copier = Copier(graph, [*tensors, *inputs, *numbers], as_tensors)
    for node in nodes:
        copier.add(node)
    code = copier.finished(outputs)
    return StageCode(
        GraphCode.of(code, graph.attributes, device),
        tuple(graph.tensors[node] for node in tensors),
        tuple(graph.numbers.index(node) for node in numbers),
        frozenset[str]().union(*(layer.written for layer in layers)),
        (start, stop),
        checkpointed=any(map(is_region, code.nodes)),
    )


def compute_whole(graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
    """Run a captured graph on this rank as one stage; returns what the graph returns, in order.

    Called for a graph that is not cut, and in a rehearsal of a training step.

    Args:
        graph: the captured network.
        values: the arguments of the graph in this call, in the order of its placeholders.
        Parameters
            and buffers are among them; those in the network itself are not looked at.
    """
    # as one stage: the same code, in the same order, as stages would run it
    code = cut_at(graph, [])[0]
    stage = Stage(code, graph.network, graph.device)
    tensors = {name: values[graph.place[node]] for node, name in graph.tensors.items()}
    leaves = graph.bind(values)
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    outputs = stage.run_with([tensors[name] for name in code.tensors], leaves, numbers)
    return graph.returned(outputs, numbers)
