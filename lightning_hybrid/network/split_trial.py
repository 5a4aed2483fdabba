"""A trial of a captured network on a batch, and on parts of it.

The graph runs in the mode in which it was captured, with the same random numbers and with
parameters (and buffers and inputs that are zero) a little off, so that a gate that starts at zero
is open:

* On the whole batch and on its parts. Sums over tensors of other sizes may be rounded otherwise, so
  this finds only what is well above rounding, beside the largest number of an output.
* On the whole batch and on one in which all samples but those of one part are others. The sizes are
  the same, so what comes of that part has the same bits, unless it depends on the other samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid._torch.graphs import higher_order_name, is_custom_operator, set_gradients
from lightning_hybrid._torch.tensors import TorchDispatchMode
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.network.graph import NetworkGraph
from lightning_hybrid.network.stage import Stage, cut_at
from lightning_hybrid.network.stage_check import fresh
from lightning_hybrid.tensors import is_deferred


def differs_in_parts(
    graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int
) -> str | None:
    """Why the parts of a batch give other numbers than the whole; ``None``: they do not.

    Args:
        graph: the captured network. If weights of it are not here, nothing is tried.
        leaves: the tensors of a call; see `NetworkGraph.bind`.
        microbatches: into how many parts, as in `torch.Tensor.chunk`.
    """
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
                return f"the output {graph.place_of(node)} depends on how the batch is split"
        for part, start, size in (rows[0], rows[-1]):
            others = once(_among_copies(graph, part, start, size, leaves), draws.again())
            its = slice(start, start + size)
            for n, node in enumerate(graph.tensor_outputs):
                if not _is_same(whole[n][its], others[n][its]):
                    return f"the output {graph.place_of(node)} depends on how the batch is split"
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
