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
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from lightning_hybrid._torch.graphs import higher_order_name, is_custom_operator, set_gradients
from lightning_hybrid._torch.random_operators import draws
from lightning_hybrid._torch.tensors import TorchDispatchMode
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.network.graph import NetworkGraph
from lightning_hybrid.network.stage_check import fresh
from lightning_hybrid.network.trial_pieces import Piece, Pieces, a_little_off, is_zero


def differs_in_parts(
    graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int
) -> str | None:
    """Why the parts of a batch give other numbers than the whole; ``None``: they do not.

    Args:
        graph: the captured network. Weights that another rank has are drawn.
        leaves: the tensors of a call; see `NetworkGraph.bind`.
        microbatches: into how many parts, as in `torch.Tensor.chunk`.
    """
    here = next((t.device for t in leaves), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    leaves = [a_little_off(t, generator, here) if is_zero(t) else t for t in leaves]
    leaves = [t if t.is_contiguous() else t.clone() for t in leaves]  # as copies of them are
    with torch.inference_mode(False):  # what an evaluation gives can't be saved for a backward
        leaves = [leaf.clone() if leaf.is_inference() else leaf for leaf in leaves]
    try:
        with torch.random.fork_rng(devices=[]):  # weights are drawn
            return _try(graph, Pieces(graph, here), leaves, microbatches)
    except _OtherDraws as error:
        return str(error)
    except (RuntimeError, ValueError) as error:  # parts that cannot be computed, or joined
        return f"its parts cannot be computed or joined ({str(error).splitlines()[0]:.120})"


def _try(
    graph: NetworkGraph, pieces: Pieces, leaves: Sequence[Tensor], microbatches: int
) -> str | None:
    rows, draws = _rows_of_parts(graph, leaves, microbatches), _SameDraws()
    whole = _Pass(graph, leaves, (0, graph.batch_of(leaves) or 0), draws.first())
    parts = [_Pass(graph, part, place, draws.of_rows(*place)) for part, place in rows]
    among = [
        (_Pass(graph, _among_copies(graph, part, place, leaves), place, draws.again()), place)
        for part, place in (rows[0], rows[-1])
    ]
    goes_back = any(map(_may_differ_in_the_backward, graph.graph.nodes))
    for piece in pieces:
        for one in (whole, *parts, *(copies for copies, _ in among)):
            one.forward(piece, keep=goes_back)
    for number, node in enumerate(graph.tensor_outputs):
        result = whole.values[number]
        same = _close(result, torch.cat([part.values[number] for part in parts])) and all(
            _is_same(*(values[number][start : start + size] for values in (whole.values, c.values)))
            for c, (start, size) in among
        )
        if not same:
            return f"the output {graph.place_of(node)} depends on how the batch is split"
    return _tried_backward(pieces, whole, parts) if goes_back else None


def _tried_backward(pieces: Pieces, whole: _Pass, parts: Sequence[_Pass]) -> str | None:
    """The same for gradients, where a backward need not be the derivative of the forward.

    Each part gets its rows of the random numbers of the whole batch here too.
    """
    for number in reversed(range(len(pieces))):
        piece, draws = pieces[number], _SameDraws()
        expected = whole.backward(piece, number, draws.first())
        sums: list[Tensor | None] = [None] * len(expected)
        for part in parts:
            found = part.backward(piece, number, draws.of_rows(*part.place))
            sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, found)]
        # one that is zero but for rounding (of a bias of keys, before a softmax) tells nothing
        rounding = _ROUNDING * max(map(_largest, whole.found), default=0.0)
        for one, other in zip(expected, sums):
            if one is not None and other is not None and not _close(one, other, rounding):
                return "gradients depend on how the batch is split"
    return None


class _Pass:
    """Some rows of a batch on their way through the pieces of a network, and back.

    Args:
        graph: the network.
        leaves: the tensors of a call with these rows.
        place: number of the first of these rows in the batch, and how many they are.
        drawing: gives them their random numbers.

    Attributes:
        values: what the pieces so far have made of them.
        found: all gradients that the backward of the last piece has found.
    """

    def __init__(
        self,
        graph: NetworkGraph,
        leaves: Sequence[Tensor],
        place: tuple[int, int],
        drawing: TorchDispatchMode,
    ) -> None:
        self._graph, self._leaves, self.place, self._drawing = graph, leaves, place, drawing
        self._numbers = graph.values_of_numbers(graph.sizes(leaves))
        self.values: list[Any] = fresh(graph, leaves)
        self._taken: list[list[Any]] = []
        self._gradients: list[Tensor | None] | None = None
        self.found: list[Tensor] = []

    def forward(self, piece: Piece, *, keep: bool) -> None:
        """Go through one more piece; ``keep``: a backward follows."""
        if keep:
            self._taken.append(self.values)
        tensors = piece.tensors
        with _trial(self._drawing, grad=False):
            own = [tensor.clone() for tensor in tensors] if self._graph.written else tensors
            self.values = piece.stage.run_with(own, self.values, self._numbers)

    def backward(
        self, piece: Piece, number: int, drawing: TorchDispatchMode
    ) -> list[Tensor | None]:
        """Go back through a piece, which runs again. Returns the gradients of its weights."""
        weights = [
            tensor.detach().clone().requires_grad_(learned and tensor.is_floating_point())
            for tensor, learned in zip(piece.tensors, piece.learned)
        ]
        inputs = fresh(self._graph, self._leaves)
        if number:
            inputs = [_as_input(value) for value in self._taken[number]]
        wanted = [weight for weight in weights if weight.requires_grad]
        ends = [*wanted, *filter(_is_rooted, inputs if number else ())]
        with _trial(drawing, grad=True):
            outputs = piece.stage.run_with(weights, inputs, self._numbers)
            starts = self._gradients
            if starts is None:
                starts = [_first_gradient(output, self.place[0]) for output in outputs]
            known = [(o, g) for o, g in zip(outputs, starts) if g is not None and _is_rooted(o)]
            found: Sequence[Tensor | None] = [None] * len(ends)
            if known and ends:
                roots, gradients = map(list, zip(*known))
                found = torch.autograd.grad(roots, ends, gradients, allow_unused=True)
        self.found = [gradient for gradient in found if gradient is not None]
        rest = iter(found[len(wanted) :])
        self._gradients = [next(rest) if number and _is_rooted(i) else None for i in inputs]
        return list(found[: len(wanted)])


def _is_rooted(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _as_input(value: Any) -> Any:
    """What a piece takes of the one before it, as a beginning of autograd's graph."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _rows_of_parts(
    graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int
) -> list[tuple[list[Tensor], tuple[int, int]]]:
    """The parts of a batch, each with the number of its first sample and of its samples."""
    start, rows = 0, []
    for part in graph.split(leaves, microbatches):
        size = graph.batch_of(part) or 0
        rows.append((part, (start, size)))
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


def _first_gradient(output: Any, start: int) -> Tensor | None:
    """A gradient of an output in which each sample has a weight of its own, rising from ``start``.

    With equal weights a mean over some samples would be like that over others.
    """
    if not _is_rooted(output):
        return None
    first = start + 1
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
    place: tuple[int, int],
    leaves: Sequence[Tensor],
) -> list[Tensor]:
    """The whole batch, with samples of one part in the places of all others."""
    (start, size), made = place, []
    for leaf, some, tensor in zip(graph.leaves, part, leaves):
        if leaf.batched:
            order = (torch.arange(len(tensor), device=tensor.device) - start) % size
            tensor = torch.empty_like(tensor).copy_(some.index_select(0, order))
        made.append(tensor)
    return made


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs differ by the rounding of single numbers at most."""
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    return torch.allclose(one, other, 16 * torch.finfo(one.dtype).eps, atol=0.0, equal_nan=True)


_ROUNDING = 1000
"""What rounding may make of a gradient that is zero, in last places of the largest gradient."""


def _close(one: Tensor, other: Tensor, rounding: float = 0.0) -> bool:
    """Whether two results differ by rounding; ``rounding``: in units of its precision."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    precision = torch.finfo(one.dtype).eps
    atol = precision**0.5 * _largest(one) + precision * rounding
    return torch.allclose(one, other, rtol=precision**0.5, atol=atol, equal_nan=True)


def _largest(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    return float(values.detach().abs().nan_to_num(0.0, 0.0).max())


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
        if draws(func, args, kwargs or {}):
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
        if not draws(func, args, kwargs or {}):
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
