"""Whether a batch may go through a network in parts.

What the graph shows is asked first: sizes that are used as numbers, results that do not follow the
batch, writes, random numbers. What it cannot show (``x - x.mean(0)``) is tried: the captured graph,
in the mode in which it was captured, with the same random numbers and with parameters (and buffers
and inputs that are zero) a little off, so that a gate that starts at zero is open.

* On the whole batch and on its parts. Sums over tensors of other sizes may be rounded otherwise, so
  this finds only what is well above rounding, beside the largest number of an output.
* On the whole batch and on one in which all samples but those of one part are others. The sizes are
  the same, so what comes of that part has the same bits, unless it depends on the other samples.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid._torch.graphs import higher_order_name, is_custom_operator, set_gradients
from lightning_hybrid._torch.modules import BatchNorm
from lightning_hybrid._torch.symbols import is_symbolic, symbols_in
from lightning_hybrid._torch.tensors import TorchDispatchMode
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.network.graph import Layer, NetworkGraph
from lightning_hybrid.network.stage import Stage, cut_at
from lightning_hybrid.network.stage_check import fresh
from lightning_hybrid.tensors.deferred import is_deferred

MICROBATCH_STATISTICS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
)
"""Buffers of batch normalisation, whose statistics are those of a micro-batch by agreement."""


def why_whole(
    graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int, *, tried: bool
) -> str | None:
    """Why a batch must go through the network as a whole; ``None``: it may be split.

    Args:
        graph: the captured network.
        leaves: the tensors of a call; see `NetworkGraph.bind`.
        microbatches: into how many parts, as in `torch.Tensor.chunk`.
        tried: whether the network is here, so that it can be tried.
    """
    return _shown(graph, leaves, microbatches) or (
        _tried(graph, leaves, microbatches) if tried else None
    )


def fits(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> bool:
    """Whether the captured graph is right for parts of these sizes."""
    parts = graph.split(leaves, microbatches)
    if _lacks_a_sample(graph, parts) is not None:
        return False
    return all(graph.guards_allow(graph.sizes(part)) for part in parts)


def _lacks_a_sample(graph: NetworkGraph, parts: Sequence[Sequence[Tensor]]) -> fx.Node | None:
    """An operation that needs two samples, where a part has one."""
    alone = any(graph.batch_of(part) == 1 for part in parts)
    return graph.needs_two_samples if alone else None


# ---------------------------------------------------------------- what the graph shows


def _shown(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> str | None:
    if graph.is_static or graph.batch_of(leaves) is None:
        return "its code was captured for one batch size only"
    reason = _of_results(graph)
    if reason is not None:
        return reason
    for layer in graph.layers:
        reason = _of_layer(graph, layer)
        if reason is not None:
            return reason
    if not fits(graph, leaves, microbatches):
        if (node := _lacks_a_sample(graph, graph.split(leaves, microbatches))) is not None:
            return f"{node.name!r}{_of_module(graph, node)} needs two samples, and a part has one"
        return "its code takes another way for other batch sizes"
    return None


def _of_results(graph: NetworkGraph) -> str | None:
    for node in graph.tensor_outputs:
        if not graph.info[node].batched:
            return f"{_place(graph, node)} does not have the batch as its first dimension"
    given = {leaf.node for leaf in graph.leaves if leaf.number}
    for node in graph.scalar_outputs:
        # a number that follows from given ones alone (a counter) is the same in all parts
        if not all(one in given or graph.is_scalar(one) for one in graph.behind(node)):
            return f"{_place(graph, node)} is read from a tensor"
    for leaf in graph.written_leaves:
        if not leaf.batched:
            return f"{leaf.name} is changed in place"
    return None


def _of_layer(graph: NetworkGraph, layer: Layer) -> str | None:
    where = f"{layer.module}.{layer.name}".removeprefix(".")
    other = [name for name in layer.written if not _is_statistic(graph.network, name)]
    if other:
        return f"it changes {other[0]!r}"
    if not layer.effects.known:
        return f"what {where!r} does depends on values"
    if layer.effects.random and not _follows_batch(graph, layer):
        return f"{where!r} draws random numbers that are not of one sample each"
    for argument, number in _numbers_taken(layer.node):
        if _has_batch(graph, number) and not _is_size_argument(layer.node, argument):
            return f"{where!r} computes with the batch size"
    return None


def _follows_batch(graph: NetworkGraph, layer: Layer) -> bool:
    """Whether the batch's size is among those of the result, in any dimension."""
    examples = [n.meta.get("example_value") for n in (layer.node, *layer.parts)]
    sizes = [size for e in examples if isinstance(e, Tensor) for size in e.shape]
    return any(is_symbolic(size) and graph.symbol in symbols_in(size) for size in sizes)


def _is_statistic(network: nn.Module, name: str) -> bool:
    owner, _, key = name.rpartition(".")
    return key in MICROBATCH_STATISTICS and isinstance(network.get_submodule(owner), BatchNorm)


def _has_batch(graph: NetworkGraph, node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return is_symbolic(example) and graph.symbol in symbols_in(example)


def _numbers_taken(node: fx.Node) -> Iterator[tuple[int | str, fx.Node]]:
    """The scalars among the arguments of an operation, with their positions or names."""
    places: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    for place, value in places:
        found: list[fx.Node] = []
        fx.node.map_arg(value, found.append)
        for one in found:
            if one.meta.get("scalar") or one.meta.get("number"):
                yield place, one


_SHAPING = {
    *("view", "reshape", "expand", "repeat", "unflatten", "broadcast_to", "new_zeros", "new_ones"),
    *("new_empty", "new_full", "zeros", "ones", "empty", "full", "rand", "randn", "tile"),
    *("_vmap_increment_nesting", "_remove_batch_dim"),
    *("view_as", "resize", "split", "chunk", "tensor_split", "narrow", "bernoulli", "normal"),
}
_FILLED_WITH = {"new_full": (2, "fill_value"), "full": (1, "fill_value")}


def _is_size_argument(node: fx.Node, place: int | str) -> bool:
    """Whether an operation takes a number as a size, and not to compute with it."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if node.target is operator.getitem:
        return False
    if higher_order_name(node.target) is not None:
        return True  # what is done with it inside, the trial shows
    if name == "randint":  # its bounds are plain arguments, its size is a tuple
        return place == "size" or (isinstance(place, int) and isinstance(node.args[place], tuple))
    return name in _SHAPING and place not in _FILLED_WITH.get(name, ())


def _place(graph: NetworkGraph, node: fx.Node) -> str:
    return f"the output {node.name!r}{_of_module(graph, node)}"


def _of_module(graph: NetworkGraph, node: fx.Node) -> str:
    layer = next((y for y in graph.layers if node is y.node or node in y.parts), None)
    return f" (of module {layer.module!r})" if layer is not None and layer.module else ""


# ---------------------------------------------------------------- what a trial shows


def _tried(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> str | None:
    state = dict((*graph.network.named_parameters(), *graph.network.named_buffers()))
    if any(is_deferred(state[name]) for name in graph.used):
        return None
    code = cut_at(graph, [])[0]
    here = next((t.device for t in leaves), torch.device("cpu"))
    stage = Stage(code, graph.network, here)
    generator = torch.Generator().manual_seed(0)
    tensors = [_a_little_off(state[name], generator, here) for name in code.tensors]
    leaves = [_a_little_off(t, generator, here) if _is_zero(t) else t for t in leaves]
    leaves = [t if t.is_contiguous() else t.clone() for t in leaves]  # as copies of them are
    draws = _SameDraws()

    def once(part: Sequence[Tensor], drawing: TorchDispatchMode) -> list[Any]:
        with _trial(drawing, grad=False):
            numbers = graph.values_of_numbers(graph.sizes(part))
            own = [tensor.clone() for tensor in tensors] if graph.written else tensors
            return stage.run_with(own, fresh(graph, part), numbers)

    try:
        rows = _rows_of_parts(graph, leaves, microbatches)
        whole = once(leaves, draws.first())
        parts = [once(part, draws.of_rows(start, size)) for part, start, size in rows]
        tensors_out = range(len(graph.tensor_outputs))
        pairs = [(whole[n], torch.cat([part[n] for part in parts])) for n in tensors_out]
        for node, (one, other) in zip(graph.tensor_outputs, pairs):
            if not _close(one, other):
                return f"{_place(graph, node)} depends on how the batch is split"
        for part, start, size in (rows[0], rows[-1]):
            others = once(_among_copies(graph, part, start, size, leaves), draws.again())
            its = slice(start, start + size)
            for n, node in enumerate(graph.tensor_outputs):
                if not _is_same(whole[n][its], others[n][its]):
                    return f"{_place(graph, node)} depends on how the batch is split"
        learned = [isinstance(state[name], nn.Parameter) for name in code.tensors]
        return _tried_backward(graph, stage, tensors, learned, leaves, microbatches)
    except _OtherDraws as error:
        return str(error)
    except (RuntimeError, ValueError) as error:  # parts that cannot be computed, or joined
        return f"its parts cannot be computed or joined ({str(error).splitlines()[0]:.120})"


def _tried_backward(
    graph: NetworkGraph,
    stage: Stage,
    tensors: Sequence[Tensor],
    learned: Sequence[bool],
    leaves: Sequence[Tensor],
    microbatches: int,
) -> str | None:
    """The same for gradients, where a backward need not be the derivative of the forward.

    Each part gets its rows of the random numbers of the whole batch here too.
    """
    if not any(map(_may_differ_in_the_backward, graph.graph.nodes)):
        return None
    with torch.inference_mode(False):  # what an evaluation gives can't be saved for a backward
        leaves = [leaf.clone() if leaf.is_inference() else leaf for leaf in leaves]
    weights = [
        tensor.detach().clone().requires_grad_(is_learned and tensor.is_floating_point())
        for tensor, is_learned in zip(tensors, learned)
    ]
    wanted = [weight for weight in weights if weight.requires_grad]

    draws = _SameDraws()

    def gradients(
        part: Sequence[Tensor], start: int, drawing: TorchDispatchMode
    ) -> list[Tensor | None]:
        with _trial(drawing, grad=True):
            numbers = graph.values_of_numbers(graph.sizes(part))
            outputs = stage.run_with(weights, fresh(graph, part), numbers)
            rooted = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
            starts = [_weights_of_samples(output, start + 1) for output in rooted]
            if not rooted or not wanted:
                return []
            return list(torch.autograd.grad(rooted, wanted, starts, allow_unused=True))

    whole = gradients(leaves, 0, draws.first())
    sums: list[Tensor | None] = [None] * len(whole)
    for part, start, size in _rows_of_parts(graph, leaves, microbatches):
        found = gradients(part, start, draws.of_rows(start, size))
        sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, found)]
    for one, other in zip(whole, sums):
        if one is not None and other is not None and not _close(one, other):
            return "gradients depend on how the batch is split"
    return None


def _rows_of_parts(
    graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int
) -> list[tuple[list[Tensor], int, int]]:
    """The parts of a batch, each with the number of its first sample and of its samples."""
    start, rows = 0, []
    for part in graph.split(leaves, microbatches):
        size = graph.batch_of(part) or 0
        rows.append((part, start, size))
        start += size
    return rows


@contextmanager
def _trial(drawing: TorchDispatchMode, *, grad: bool) -> Iterator[None]:
    """Inside, a network is tried on some rows of a batch, and nothing outside hears of it."""
    with (
        torch.inference_mode(False),
        torch.random.fork_rng(devices=[]),
        torch.set_grad_enabled(grad),
        _StatisticsAside(),
        drawing,
    ):
        yield


def _weights_of_samples(output: Tensor, first: int) -> Tensor:
    """A gradient of an output in which each sample has a weight of its own, rising from ``first``.

    With equal weights a mean over some samples would be like that over others.
    """
    weights = torch.arange(first, first + len(output), dtype=output.dtype, device=output.device)
    return weights.view(-1, *[1] * (output.dim() - 1)).expand_as(output)


def _may_differ_in_the_backward(node: fx.Node) -> bool:
    """Whether a backward is the user's own code, or leaves out a part of the forward."""
    return (
        node.target in ("detach", "detach_", torch.detach, set_gradients)
        or higher_order_name(node.target) == "autograd_function_apply"
        or is_custom_operator(node.target)
    )


def _among_copies(
    graph: NetworkGraph,
    part: Sequence[Tensor],
    start: int,
    size: int,
    leaves: Sequence[Tensor],
) -> list[Tensor]:
    """The whole batch, with samples of one part in the places of all others."""
    made = []
    for leaf, some, tensor in zip(graph.leaves, part, leaves):
        if leaf.batched:
            order = (torch.arange(len(tensor), device=tensor.device) - start) % size
            tensor = torch.empty_like(tensor).copy_(some.index_select(0, order))
        made.append(tensor)
    return made


def _a_little_off(value: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """A copy with noise, so that nothing is zero by initialisation."""
    copy = value.detach().to(device, copy=True)
    if not copy.is_floating_point() or not copy.numel():
        return copy
    if not (isinstance(value, nn.Parameter) or _is_zero(copy)):
        return copy  # what is no parameter may have to be as it is, but a zero may close a gate
    noise = torch.randn(copy.shape, generator=generator, dtype=torch.float32)
    spread = copy.float().std().item() if copy.numel() > 1 else 0.0
    return copy.add_(noise.to(device, copy.dtype), alpha=0.1 * (spread or 0.5))


def _is_zero(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.any()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs differ by the rounding of single numbers at most."""
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    return torch.allclose(one, other, 16 * torch.finfo(one.dtype).eps, atol=0.0, equal_nan=True)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    scale = one.abs().nan_to_num(0.0, 0.0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


class _StatisticsAside(TorchFunctionMode):
    """Batch normalisation mixes samples by agreement: here it takes what it has learned."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.batch_norm:
            return self._affine(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _affine(
        value: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        channels = value.shape[1]
        mean = value.new_zeros(channels) if mean is None else mean
        variance = value.new_ones(channels) if variance is None else variance
        return F.batch_norm(value, mean, variance, weight, bias, False, momentum, eps)


class _OtherDraws(Exception):
    """The parts draw other random numbers than the whole."""


class _SameDraws:
    """Random numbers drawn once for the whole batch; the parts get their rows of them.

    Each method makes a mode.
    """

    def __init__(self) -> None:
        self._drawn: list[list[Tensor]] = []

    def first(self) -> TorchDispatchMode:
        """For the whole batch, which draws."""
        return _Noting(self._drawn)

    def again(self) -> TorchDispatchMode:
        """For another batch of this size, which gets the same numbers."""
        return _Drawing(self._drawn, None)

    def of_rows(self, start: int, size: int) -> TorchDispatchMode:
        """For so many samples of the batch."""
        return _Drawing(self._drawn, (start, size))


class _Noting(TorchDispatchMode):
    def __init__(self, drawn: list[list[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = drawn

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._drawn.append([tensor.clone() for _, tensor in tensors_in(result)])
        return result


class _Drawing(TorchDispatchMode):
    def __init__(self, drawn: list[list[Tensor]], rows: tuple[int, int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn, self._of, self._count = drawn, rows, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if self._count >= len(self._drawn):
            raise _OtherDraws("it draws more random numbers for a part than for the whole batch")
        for (_, tensor), whole in zip(tensors_in(result), self._drawn[self._count]):
            tensor.copy_(self._rows(whole, tensor, func))
        self._count += 1
        return result

    def _rows(self, whole: Tensor, part: Tensor, func: Any) -> Tensor:
        """The draws of this part's samples, the batch being the outer half of a dimension.

        (Where it is not, other samples' draws are taken, and the results will differ.)
        """
        if self._of is None and whole.shape == part.shape:
            return whole
        first, size = self._of or (0, 1)
        other = [d for d, (a, b) in enumerate(zip(whole.shape, part.shape)) if a != b]
        if len(other) != 1 or whole.dim() != part.dim() or part.shape[other[0]] % size:
            raise _OtherDraws(f"{func} draws random numbers that are not of one sample each")
        each = part.shape[other[0]] // size
        start = first * each
        if start + each * size > whole.shape[other[0]]:
            raise _OtherDraws(f"{func} draws random numbers that are not of one sample each")
        return whole.narrow(other[0], start, each * size)
