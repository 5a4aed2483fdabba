"""Cut a traced network into stages, one `nn.Module` each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.network.cuts import Cuts
from lightning_hybrid.network.deferred import make
from lightning_hybrid.network.graph import ANCHORED, NetworkGraph, size_from
from lightning_hybrid.network.partition import NetworkPartition


def compiled(code: Callable[..., Any]) -> Callable[..., Any]:
    """``code`` through ``torch.compile``, for each size by itself.

    Inductor has generators of its own, but random layers are to draw what they draw uncompiled. And
    for free sizes it cannot compile some networks that it can for fixed ones (a 3-D max pooling
    before a convolution, for instance, in torch 2.13).
    """
    return torch.compile(code, dynamic=False, options={"fallback_random": True})


class Stage(nn.Module):
    """The layers between two cuts: takes and returns a list of tensors.

    The modules stay the network's own and are not registered here: their names, their state and
    their training flags are still the network's, so ``train`` and ``state_dict`` are called on the
    network. `move` is for the device.

    Args:
        namespace: what the generated code reads modules and constants from.
        graph: the stage's part of the traced network.
        network: the network.
        modules: dotted names of the modules that it calls.
        names: dotted names of the parameters and buffers that it uses.
        layers: (first, after last) number of its layers.
    """

    def __init__(
        self,
        namespace: SimpleNamespace,
        graph: fx.Graph,
        network: nn.Module,
        modules: Sequence[str],
        names: frozenset[str],
        layers: tuple[int, int],
    ) -> None:
        super().__init__()
        self.graph = graph
        self.layers = layers
        self.module_names = tuple(modules)
        self._namespace = namespace
        self._owned = names
        self._code = _as_function(graph)
        self.compiled = False

    def compile_code(self) -> None:
        """From now on run through ``torch.compile``; the network's modules stay what they are."""
        if not self.compiled:
            self.compiled = True
            self._code = compiled(self._code)

    def forward(self, values: list[Tensor]) -> list[Tensor]:
        """Run the layers of this stage."""
        output: list[Tensor] = self._code(self._namespace, *values)
        return output

    def move(self, device: torch.device | str) -> None:
        """Move the network's parameters, buffers and constants that this stage uses."""
        make([*self.parameters(), *self.buffers()])
        for _, parameter in self.named_parameters():
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.to(device)
        constants = {str(n.target) for n in self.graph.nodes if n.op == "get_attr"}
        names = {*self.buffer_names, *(name.removeprefix("network.") for name in constants)}
        for name in names - set(self.parameter_names):
            path, _, key = name.rpartition(".")
            if path.partition(".")[0] == "constants":
                continue  # no tensors: those were given a name in the network
            owner = self.network.get_submodule(path)
            value = getattr(owner, key)
            if isinstance(value, Tensor):
                setattr(owner, key, value.to(device))

    @property
    def network(self) -> nn.Module:
        """The whole network."""
        network: nn.Module = self._namespace.network
        return network

    @property
    def network_modules(self) -> tuple[nn.Module, ...]:
        """The network's modules that this stage calls."""
        return tuple(self.network.get_submodule(name) for name in self.module_names)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Dotted names, in the network, of the parameters that this stage uses."""
        return tuple(name for name, _ in self.named_parameters())

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """Dotted names, in the network, of the buffers that this stage uses."""
        return tuple(name for name, _ in self.named_buffers())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The network's parameters that this stage uses, under their names in the network."""
        for name, value in self.network.named_parameters(prefix, recurse, remove_duplicate):
            if name.removeprefix(prefix).lstrip(".") in self._owned:
                yield name, value

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The network's buffers that this stage uses, under their names in the network."""
        for name, value in self.network.named_buffers(prefix, recurse, remove_duplicate):
            if name.removeprefix(prefix).lstrip(".") in self._owned:
                yield name, value


def _as_function(graph: fx.Graph) -> Callable[..., list[Tensor]]:
    """The graph as a Python function; it forgets each tensor after its last use."""
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<stage>", "exec"), scope)
    forward: Callable[..., list[Tensor]] = scope["forward"]
    return forward


def cut(
    graph: NetworkGraph, partitions: Sequence[NetworkPartition], boundaries: Sequence[int]
) -> list[Stage]:
    """Cut the network before the partitions numbered ``boundaries``.

    Stage 0 takes the tensors of `NetworkGraph.bind`, each later stage what the one before it
    returns, and `NetworkGraph.pack` makes the network's return value of what the last one returns.
    A tensor that is needed further on passes through the stages between.

    Args:
        graph: the traced network.
        partitions: its partitions.
        boundaries: rising numbers of the partitions that stages 1, 2 ... begin with; none: one
            stage.

    Raises:
        NetworkError: the boundaries are out of order or out of range.
    """
    if list(boundaries) != sorted(set(boundaries)) or not all(
        0 < boundary < len(partitions) for boundary in boundaries
    ):
        raise NetworkError(
            f"boundaries {list(boundaries)} must rise and lie in 1..{len(partitions) - 1} "
            f"(the network has {len(partitions)} partitions)"
        )
    cuts = Cuts(graph)
    places = [0, *(partitions[b].start for b in boundaries), len(graph.layers)]
    namespace = SimpleNamespace(network=graph.network, constants=SimpleNamespace(**graph.constants))
    return [_stage(graph, cuts, namespace, start, stop) for start, stop in pairwise(places)]


def _stage(
    graph: NetworkGraph, cuts: Cuts, namespace: SimpleNamespace, start: int, stop: int
) -> Stage:
    is_last = stop == len(graph.layers)
    inputs = list(graph.inputs) if start == 0 else cuts.crossing(start)
    outputs = list(graph.outputs) if is_last else cuts.crossing(stop)
    copier = _Copier(graph, inputs)
    layers = graph.layers[start:stop]
    for layer in layers:
        copier.layer(layer.node)
        for part in layer.parts:
            copier.layer(part)
    code = copier.finished(outputs)
    modules = dict.fromkeys(layer.module for layer in layers if layer.is_module)
    names = frozenset[str]().union(*(layer.parameters | layer.buffers for layer in layers))
    # an output may be a parameter that no layer uses
    names |= {str(n.target).removeprefix("network.") for n in code.nodes if n.op == "get_attr"}
    return Stage(namespace, code, graph.network, list(modules), names, (start, stop))


class _Copier:
    """Copies layers into the graph of one stage, with the size arithmetic that they need."""

    def __init__(self, graph: NetworkGraph, inputs: Sequence[fx.Node]) -> None:
        self.source = graph
        self.graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copy = self.graph.placeholder(node.name)
            copy.meta.update(node.meta)
            self._copies[node] = copy
        self._anchor = next((n for n in inputs if self._batch_dim(n)), None)
        self._inputs = inputs

    def layer(self, node: fx.Node) -> None:
        """Copy one node of a layer."""
        self._copies[node] = self.graph.node_copy(node, self._copy)

    def finished(self, outputs: Sequence[fx.Node]) -> fx.Graph:
        """The stage's graph, returning copies of ``outputs``."""
        self.graph.output([self._copy(node) for node in outputs])
        self.graph.lint()
        return self.graph

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:  # a parameter, or arithmetic on sizes
            if node.target in ANCHORED and not isinstance(node.target, str):
                self._copies[node] = self._anchored(node)
            else:
                self._copies[node] = self.graph.node_copy(node, self._copy)
        return self._copies[node]

    def _anchored(self, node: fx.Node) -> fx.Node:
        """The same number, or the same device, from a tensor that this stage has."""
        target: Any = node.target
        if target is not size_from or self._anchor is None:
            return self.graph.call_function(target, (self._copies[self._inputs[0]],))
        old, _, numerator, denominator, offset = cast(tuple[Any, ...], node.args)
        (_, was), (dim, now) = self._batch_dim(old), self._batch_dim(self._anchor)
        ratio = Fraction(numerator, denominator) * was / now
        numbers = (dim, ratio.numerator, ratio.denominator, offset)
        return self.graph.call_function(size_from, (self._copies[self._anchor], *numbers))

    def _batch_dim(self, node: Any) -> Any:
        value = self.source.value(node)
        return value.batch_dim if value is not None else None
