"""Make a `NetworkGraph` of the merged recordings."""

from __future__ import annotations

import enum
import hashlib
import operator
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.network.effects import state_of
from lightning_hybrid.network.graph import (
    Layer,
    Leaf,
    NetworkGraph,
    Slot,
    all_inputs,
    by_mode,
    device_of,
    size_from,
)
from lightning_hybrid.network.merge import ByMode, Device, MergedCall, Size, Value
from lightning_hybrid.network.recording import Ref
from lightning_hybrid.network.structure import Step, children, is_dataclass_value, rebuild

_PLAIN_TYPES = (
    int, float, complex, str, bytes, bool, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Constants that can be written into generated code; others are kept in a table."""


class Builder:
    """Builds the graph of one network, node by node, in the order of the calls."""

    def __init__(self, network: nn.Module, device: torch.device, inputs: Sequence[Value]) -> None:
        self.network = network
        self.device = device
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self._nodes: dict[Ref, fx.Node] = {}
        self._attributes: dict[str, fx.Node] = {}
        self._inputs: list[fx.Node] = []
        for number, value in enumerate(inputs):
            node = self.graph.placeholder(f"input_{number}")
            node.meta["value"] = value
            self._nodes[Ref("input", number)] = node
            self._inputs.append(node)
        parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
        first = {id(value): name for name, value in (*parameters.items(), *buffers.items())}
        # a tied tensor has several names and one first name
        self._first_name = {
            name: first[id(value)]
            for kind in (network.named_parameters, network.named_buffers)
            for name, value in kind(remove_duplicate=False)
        }
        self._parameters, self._buffers = parameters.keys(), buffers.keys()

    def build(
        self,
        calls: Sequence[MergedCall],
        output: Any,
        *,
        structure: Hashable,
        leaves: tuple[Leaf, ...],
        autocast: torch.dtype | None,
        training: bool | None,
        batch: int | None,
        opaque: dict[str, str],
        changed: dict[int, Any],
        example: tuple[Any, Any],
    ) -> NetworkGraph:
        """The finished graph; the keywords are the fields of `NetworkGraph`.

        ``changed`` holds the objects that opaque modules change when they are called.
        """
        wanted = _wanted(calls, output)
        layers = [self._layer(i, call, wanted[i]) for i, call in enumerate(calls)]
        outputs: list[fx.Node] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, Ref):
                return value
            outputs.append(self._node(value))
            return Slot(len(outputs) - 1)

        template = rebuild(output, leaf)
        self.graph.output(outputs)
        called = {layer.module for layer in layers if layer.is_module}
        kept = {name: why for name, why in opaque.items() if name in called}
        return NetworkGraph(
            self.network, self.graph, tuple(layers), self.constants, template, tuple(outputs),
            structure, leaves, autocast, training, batch, kept, self._memories(called, changed),
            self._fingerprint((structure, leaves, autocast)), example,
        )  # fmt: skip

    def _layer(self, index: int, call: MergedCall, wanted: set[tuple[Step, ...]]) -> Layer:
        args = tuple(self._argument(value) for value in call.args)
        kwargs = {name: self._argument(value) for name, value in call.kwargs.items()}
        is_module = call.op == "call_module"
        target = f"network.{call.target}" if is_module else call.target
        name = call.target.replace(".", "_") if is_module else None
        node = self.graph.create_node(call.op, target, args, kwargs, name)
        parts = self._parts(index, node, call, wanted)
        names = self._state_names(call, node)
        return Layer(
            node.name,
            node,
            tuple(parts),
            call.target if is_module else (call.scope[-1] if call.scope else ""),
            is_module,
            call.target,
            tuple(call.returned.values()),
            frozenset(names & self._parameters),
            frozenset(names & self._buffers),
            call.mutated,
            frozenset(self._first_name[name] for name in call.mutated_names),
            call.flops,
        )

    def _parts(
        self, index: int, node: fx.Node, call: MergedCall, wanted: set[tuple[Step, ...]]
    ) -> list[fx.Node]:
        """One node for each tensor in what the call returns that somebody uses."""
        made: dict[tuple[Step, ...], fx.Node] = {(): node}
        for path, value in call.returned.items():
            if path and path not in wanted:
                continue
            for depth in range(1, len(path) + 1):
                kind, key = path[depth - 1]
                if path[:depth] not in made:
                    function = operator.getitem if kind == "item" else getattr
                    made[path[:depth]] = self.graph.call_function(
                        function, (made[path[: depth - 1]], key)
                    )
            made[path].meta["value"] = value
            self._nodes[Ref("call", index, path)] = made[path]
        return [part for path, part in made.items() if path]

    def _state_names(self, call: MergedCall, node: fx.Node) -> set[str]:
        if call.op == "call_module":
            module = self.network.get_submodule(call.target)
            names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
            return {self._first_name[f"{call.target}.{name}"] for name in names}
        attributes = [str(n.target).removeprefix("network.") for n in all_inputs(node)]
        return {self._first_name[name] for name in attributes if name in self._first_name}

    def _memories(self, called: set[str], changed: dict[int, Any]) -> tuple[frozenset[str], ...]:
        """For each object that layers change: which of them hold it."""
        held = {name: set(map(id, state_of(self.network.get_submodule(name)))) for name in called}
        groups = (frozenset(n for n in called if number in held[n]) for number in changed)
        return tuple(group for group in groups if group)

    # ------------------------------------------------------------------ arguments

    def _argument(self, value: Any) -> Any:
        """What an argument is in the graph."""
        if isinstance(value, Ref):
            return self._node(value)
        if isinstance(value, Size):
            return self._size(value)
        if isinstance(value, Device):
            return self._pure(device_of, (self._inputs[0],)) if self._inputs else self.device
        if isinstance(value, ByMode):
            flag = self._attribute(f"{value.module}.training".removeprefix("."))
            constants = self._argument(value.training), self._argument(value.evaluation)
            return self._pure(by_mode, (flag, *constants))
        if isinstance(value, slice):
            return slice(*(self._argument(end) for end in (value.start, value.stop, value.step)))
        if is_dataclass_value(value):
            fields = {key: self._argument(part) for (_, key), part in children(value) or ()}
            return self._pure(type(value), (), fields)
        if isinstance(value, dict):
            return {key: self._argument(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            parts = [self._argument(part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        return value if type(value) in _PLAIN_TYPES else self._constant(value)

    def _node(self, ref: Ref) -> fx.Node:
        return self._attribute(str(ref.source)) if ref.kind == "attribute" else self._nodes[ref]

    def _attribute(self, name: str) -> fx.Node:
        name = self._first_name.get(name, name)
        if name not in self._attributes:
            node = self.graph.create_node("get_attr", f"network.{name}")
            node.meta["pure"] = True
            self._attributes[name] = node
        return self._attributes[name]

    def _constant(self, value: Any) -> fx.Node:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        node = self.graph.create_node("get_attr", f"constants.{name}")
        node.meta["pure"] = True
        return node

    def _size(self, size: Size) -> fx.Node:
        for node in self._inputs:
            batch_dim = node.meta["value"].batch_dim
            if batch_dim is not None:
                dim, slope = batch_dim
                ratio = size.slope / slope
                numbers = (dim, ratio.numerator, ratio.denominator, int(size.offset))
                return self._pure(size_from, (node, *numbers))
        raise NetworkError("a layer needs the batch size, but no input has one")

    def _pure(self, function: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        node = self.graph.call_function(function, args, kwargs)
        node.meta["pure"] = True
        return node

    # ------------------------------------------------------------------ fingerprint

    def _fingerprint(self, key: Hashable) -> str:
        lines = [_stable(key)]
        lines += [f"{name} {tuple(p.shape)}" for name, p in self.network.named_parameters()]
        lines += [f"{name} {_stable(value)}" for name, value in self.constants.items()]
        for node in self.graph.nodes:
            value = node.meta.get("value")
            shape = (value.size, value.dtype) if isinstance(value, Value) else ()
            target = node.target if isinstance(node.target, str) else _qualified(node.target)
            arguments = _stable(node.args), _stable(dict(node.kwargs))
            lines.append(f"{node.name} {node.op} {target} {arguments} {shape}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _wanted(calls: Sequence[MergedCall], output: Any) -> dict[int, set[tuple[Step, ...]]]:
    """For each call, the parts of what it returns that somebody uses."""
    wanted: dict[int, set[tuple[Step, ...]]] = defaultdict(set)

    def look(value: Any) -> None:
        if isinstance(value, Ref) and value.kind == "call":
            wanted[int(value.source)].add(value.path)
        elif isinstance(value, slice):
            for end in (value.start, value.stop, value.step):
                look(end)
        elif not isinstance(value, Ref | Size | ByMode):
            for _, part in children(value) or ():
                look(part)

    look([(call.args, call.kwargs) for call in calls])
    look(output)
    return wanted


def _qualified(value: Any) -> str:
    owner = getattr(value, "__objclass__", None)
    module = getattr(value, "__module__", None) or (owner.__module__ if owner else "")
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _stable(value: Any) -> str:
    """A text for a value that is the same in every process."""
    if isinstance(value, (*_PLAIN_TYPES, fx.Node)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, slice):
        return f"slice({_stable((value.start, value.stop, value.step))})"
    parts = children(value)
    if parts is not None:
        name = (
            ""
            if type(value).__module__ == "torch.fx.immutable_collections"
            else _qualified(type(value))
        )
        return f"{name}({', '.join(f'{step[1]}={_stable(part)}' for step, part in parts)})"
    return _qualified(value if isinstance(value, type) or callable(value) else type(value))
