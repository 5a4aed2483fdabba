"""What the operations of a captured graph do beside returning a value, found by one run.

The graph runs once on fake tensors (shapes without memory), operation by operation. For each it is
noted which memory it writes to, which of its results share memory, whether it draws random numbers,
whether it switches a mode, and how many floating-point operations (FLOPs) it takes. The
FLOPs of convolutions, matrix products and attention are counted here, at the captured sizes. If an
operation cannot run without values, nothing is known of it and of all later ones: they may draw
random numbers, and the network is not cut after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from lightning_hybrid._torch.autograd import dual_level, functorch_level
from lightning_hybrid._torch.graphs import attention_of_cpu
from lightning_hybrid._torch.symbols import (
    OF_VALUES,
    ShapeEnv,
    captured_value,
    symbols_in,
    value_with,
)
from lightning_hybrid._torch.tensors import (
    FakeTensorMode,
    TorchDispatchMode,
    arguments,
    as_they_are,
    draws,
    storage_key,
    version,
)
from lightning_hybrid._trees import tensors_in


@dataclass(frozen=True)
class Effects:
    """What one operation does beside returning a value.

    Memory has numbers: tensors that share memory have the same number.

    Attributes:
        results: numbers of the memory that the returned tensors lie in.
        writes: numbers of the memory that the operation changes in place.
        random: whether it draws from torch's generators; true also if that is not known.
        ambient: whether, after it, the modes that a cut cannot switch (``vmap`` levels, derivatives
            in forward mode, inference mode) are as at the beginning of the graph.
        unknown: why its effects are not known, in words that follow "what it does"; ``None``: they
            are known.
        flops: floating-point operations of convolutions and matrix products, at the captured sizes.
    """

    results: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    random: bool = False
    ambient: bool = True
    unknown: str | None = None
    flops: int = 0


@dataclass
class Annotations:
    """The effects of all operations of a graph, and which of its tensors share memory.

    Attributes:
        of: the effects of each node that is an operation.
        memory: per node that is a tensor, the number of its memory; equal numbers mean shared
            memory.
    """

    of: dict[fx.Node, Effects] = field(default_factory=dict)
    memory: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def written(self) -> frozenset[int]:
        """The numbers of all memory that some operation changes in place."""
        return frozenset[int]().union(*(effects.writes for effects in self.of.values()))


def annotate(graph: fx.Graph, attributes: Mapping[str, Any], batch: int) -> Annotations:
    """Find the effects of all operations of a captured graph, by one run on fake tensors.

    Args:
        graph: a graph from TorchDynamo, in which ``meta`` of each node has an ``example_value``:
            the tensor without memory, or the number, that TorchDynamo has found for it.
        attributes: the values of its ``get_attr`` nodes (constants, nested graphs), by name.
        batch: the batch size, which is also taken for each size that depends on values of tensors.
    """
    with as_they_are(), torch.inference_mode(False):
        return _Annotator(graph, attributes, batch).annotations()


def arguments_of(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
    """The arguments of a node, with values in the place of nodes.

    Args:
        node: the node.
        values: the value of each node that it takes.

    Returns:
        ``(args, kwargs)``: the positional arguments as a tuple, the keyword arguments as a
        dictionary.
    """
    args: Any = fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.map_arg(dict(node.kwargs), values.__getitem__)
    return args, kwargs


def called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run the operation of a node (a function or a method) on these arguments; returns its result.

    Args:
        node: the node.
        args: its positional arguments; for a method the first one is the object.
        kwargs: its keyword arguments.
    """
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = node.target
    return function(*args, **kwargs)


FAILURES = (
    RuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""Errors of an operation in a run on fake tensors that are caught: then nothing is known of it.

Others (an interrupt) are not caught."""


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Floating-point operations of attention: two matrix products per head.

    `FlopCounterMode`, which counts attention on GPUs alike, calls this for attention on CPUs.

    The arguments are shapes, as (batch, heads, positions, features).
    """
    batch, heads, positions, features = query
    return 2 * batch * heads * positions * key[2] * (features + value[3])


class _Annotator:
    def __init__(self, graph: fx.Graph, attributes: Mapping[str, Any], batch: int) -> None:
        self.graph = graph
        self.attributes = attributes
        self.batch = batch
        self.found = Annotations()
        self.values: dict[fx.Node, Any] = {}
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self.flops = FlopCounterMode(
            display=False, custom_mapping={attention_of_cpu: _attention_flops}
        )
        self.watch = _EffectsMode()
        self.lost: str | None = None

    def annotations(self) -> Annotations:
        before = _fixed_modes()
        with modes_restored(), self.mode, self.flops, self.watch:
            for node in self.graph.nodes:
                self._take(node, before)
        return self.found

    def _take(self, node: fx.Node, before: tuple[Any, ...]) -> None:
        if node.op == "placeholder":
            try:
                self.values[node] = self._made(node.meta.get("example_value"))
            except (NotImplementedError, RuntimeError) as error:
                self.values[node], self.lost = None, _why(error)
        elif node.op == "get_attr":
            self.values[node] = self.attributes[str(node.target)]
            return
        elif node.op != "output":
            self.found.of[node] = self._effects(node, before)
        value = self.values.get(node)
        if isinstance(value, Tensor):
            self.found.memory[node] = self._memory(value)

    def _effects(self, node: fx.Node, before: tuple[Any, ...]) -> Effects:
        # the counter and the watch stay on for the whole run: a node's share is a difference
        before_it, self.watch.uses_rng = self.flops.get_total_flops(), False
        writes = self._run(node) | {self._memory(t) for t in self.watch.statistics}
        self.watch.statistics.clear()
        if self.lost is not None:
            return Effects(random=True, unknown=self.lost)
        return Effects(
            frozenset(self._memory(t) for _, t in tensors_in(self.values[node])),
            frozenset(writes),
            self.watch.uses_rng,
            _fixed_modes() == before,
            None,
            captured_size(self.flops.get_total_flops() - before_it, self.batch),
        )

    def _run(self, node: fx.Node) -> set[int]:
        if self.lost is not None:
            return set()
        args, kwargs = arguments_of(node, self.values)
        # a write in place raises the version of a tensor, whatever the operation says of itself
        before = [(tensor, version(tensor)) for _, tensor in tensors_in((args, kwargs))]
        try:
            self.values[node] = called(node, args, kwargs)
        except FAILURES as error:
            self.lost = _why(error)
            return set()
        return {self._memory(t) for t, number in before if version(t) != number}

    def _made(self, example: Any) -> Any:
        """A stand-in for an input: a fake tensor of the captured sizes, or the captured number.

        Args:
            example: the input's example value from TorchDynamo.

        Raises:
            NotImplementedError: it is a sparse or nested tensor.
        """
        if isinstance(example, Tensor):
            if example.layout is not torch.strided or example.is_nested:
                raise NotImplementedError("a sparse or nested tensor")
            shape = [captured_size(size, self.batch) for size in example.shape]
            stride = [captured_size(step, self.batch) for step in example.stride()]
            # (with its strides: whether a reshape is a view, which shares memory, depends on them)
            made = torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device)
            return made.requires_grad_(example.requires_grad)
        return captured_value(example)

    def _memory(self, tensor: Tensor) -> int:
        key, storage = memory_of(tensor)
        self.alive.append(storage)  # the address of a freed storage could be given to another one
        return self.numbers.setdefault(key, len(self.numbers))


def memory_of(tensor: Tensor) -> tuple[int, Any]:
    """A key for the memory of a tensor, and an object that the caller must keep alive with it.

    Tensors that share memory have equal keys. As long as the object (the storage, or a sparse
    tensor itself) is alive, no other memory has that key.
    """
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return -id(tensor), tensor
    return storage_key(storage), storage


def _why(error: Exception) -> str:
    """Say why an operation's effects are unknown, in words that follow "what it does".

    Args:
        error: what its run on fake tensors has raised.
    """
    if type(error).__name__ in OF_VALUES:
        return "depends on values"
    text = str(error).strip().partition("\n")[0]
    return f"is not known, since it fails without values ({type(error).__name__}: {text:.120})"


def captured_size(number: Any, batch: int) -> int:
    """A size or other number as the integer that it was in the captured call.

    Args:
        number: a plain or symbolic number.
        batch: the value to take for all symbols in it, if the number depends on values of tensors,
            so that the capture does not tell it.
    """
    known = captured_value(number)
    if known is None:
        known = value_with(number, dict.fromkeys(symbols_in(number), batch))
    return int(known)


class _EffectsMode(TorchDispatchMode):
    """A dispatch mode that notes random operators, and statistics that batch normalisation writes.

    (Neither the schema of batch normalisation nor version counters tell that it writes these.)

    Attributes:
        uses_rng: whether an operator has drawn random numbers since the user of the mode reset
            this.
        statistics: running means and variances that were written since the user cleared this list.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses_rng = False
        self.statistics: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.uses_rng |= draws(func, args, kwargs)
        given = arguments(func, args, kwargs)
        if given.get("training", given.get("train")):
            running = (given.get(name) for name in ("running_mean", "running_var"))
            self.statistics += [tensor for tensor in running if isinstance(tensor, Tensor)]
        return func(*args, **kwargs)


def _fixed_modes() -> tuple[Any, ...]:
    """The present state of all modes that a stage cannot switch by itself.

    (Gradient mode and autocast are not among them: a stage switches these itself.)

    Returns:
        A tuple to compare with others: whether inference mode is on, the default type, the level of
        function transforms, that of derivatives in forward mode.
    """
    inference, dtype = torch.is_inference_mode_enabled(), torch.get_default_dtype()
    return inference, dtype, functorch_level(), dual_level()


@contextmanager
def modes_restored() -> Iterator[None]:
    """A context that on exit restores gradient mode, default type and autocast.

    A failed run of a graph may leave them changed.
    """
    gradients, default = torch.is_grad_enabled(), torch.get_default_dtype()
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(default)
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
