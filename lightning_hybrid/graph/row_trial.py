"""A trial of one operation that no rule covers: does it treat samples one by one?

Custom operators and ``torch.autograd.Function`` may do anything, and their backward need not be the
derivative of their forward. Such an operation is tried by itself, on random numbers of the shapes
that it is given, small and large ones: forward and backward, on a batch, on each half of the batch,
and on the batch with other samples in its second half. A trial is no proof, so an operation that
has passed one is named to the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import outside_of_transforms
from lightning_hybrid._torch.symbols import captured_value, is_symbolic, symbols_in, value_with
from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.graph.graph import joined, slices
from lightning_hybrid.graph.operation_effects import FAILURES
from lightning_hybrid.graph.rows import Label, Rows

_SIZES = [2, 2]
"""The number of samples in each part of a trial's batch."""
_SCALES = (1.0, 1e-3, 1e3, 1e6)
"""Magnitudes to try, of inputs and of incoming gradients: some operations clip large numbers."""


@dataclass(frozen=True)
class Trial:
    """A trial of an operation: whether samples meet in it, as far as random numbers show.

    Attributes:
        run: computes the operation, from its arguments in the form of ``given``.
        given: its arguments, as containers with fake tensors and numbers.
        labels: where the samples are in these tensors, in order; no label is ``MEET``.
        results: where the samples are in the tensors that the operation returns, in order, if it
            treats samples one by one.
        symbols: the size symbols that stand for the number of samples.
    """

    run: Callable[[Any], Any]
    given: Any
    labels: Sequence[Label]
    results: Sequence[Label]
    symbols: Sequence[Any]

    def passes(self) -> bool:
        """Run the trial; returns whether it has shown no sign of samples that meet.

        False also if the operation fails, or if a dimension holds all samples several times
        (`Rows.outer`). The random state of torch on the CPU is restored.
        """
        if any(isinstance(one, Rows) and one.outer != 1 for one in (*self.labels, *self.results)):
            return False
        # neither the user's generators nor transforms around the call may see anything of it
        with outside_of_transforms(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.default_generator.manual_seed(0)  # (and not those of GPUs)
            try:
                return self._agrees()
            except FAILURES:  # such as one that refuses random numbers
                return False

    def _agrees(self) -> bool:
        scales = [(1.0, 1.0), *((s, 1.0) for s in _SCALES[1:]), *((1.0, s) for s in _SCALES[1:])]
        return all(self._agrees_at(*each) for each in scales)

    def _agrees_at(self, inputs: float, incoming: float) -> bool:
        """Whether results and gradients for a random batch agree with those for its halves alone.

        They must also be the same in the first half if the second half has other samples.

        Args:
            inputs: magnitude of the random inputs.
            incoming: magnitude of the incoming gradients.
        """
        one, other = self._batch(inputs), self._batch(inputs)
        if not all(tensor.numel() for tensor in one):
            return False  # (what is computed of nothing shows nothing)
        parts = list(zip(*map(self._parts, one, self.labels)))
        foreign = zip(*map(self._parts, other, self.labels))
        mixed = [
            joined([part, another], label) if isinstance(label, Rows) else part
            for part, another, label in zip(parts[0], [*foreign][1], self.labels)
        ]
        whole, among, *found = (
            self._computed(tensors, samples, start, incoming)
            for tensors, samples, start in (
                (one, sum(_SIZES), 0),
                (mixed, sum(_SIZES), 0),
                *zip(parts, _SIZES, (0, _SIZES[0])),
            )
        )
        # (the gradient of an input that all samples share is a sum over them; an input that has no
        # part in the loss has none to compare)
        results = zip(self.results, whole[0], among[0], *(outputs for outputs, _ in found))
        gradients = zip(self.labels, whole[1], among[1], *(inputs for _, inputs in found))
        return all(_is_own(*each) for each in results) and all(
            _is_own(*each, summed=True) for each in gradients if each[1] is not None
        )

    def _computed(
        self, tensors: Sequence[Tensor], samples: int, start: int, incoming: float
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Run the operation forward and backward on some samples.

        Args:
            tensors: its inputs.
            samples: how many samples they have.
            start: index of the first of these samples in the batch.
            incoming: magnitude of the incoming gradients.

        Returns:
            Its results, and for each input the gradient; ``None``: the input has none.

        Raises:
            ValueError: numbers are not finite, so that they show nothing.
        """
        # (copies: the next run begins with the same numbers)
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
        rest = iter(leaves)
        given = rebuild(
            self.given,
            lambda v: next(rest) if isinstance(v, Tensor) else self._number(v, samples),
        )
        outputs = [tensor for _, tensor in tensors_in(self.run(given))]
        losses = [
            (output * (_size(incoming, output) * _weights(output, label, samples, start))).sum()
            for output, label in zip(outputs, self.results, strict=True)
            if isinstance(label, Rows) and output.requires_grad
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found: dict[int, Tensor | None] = {}
        if losses and wanted:
            gradients = torch.autograd.grad(sum(losses[1:], losses[0]), wanted, allow_unused=True)
            found = dict(zip(map(id, wanted), gradients))
        if not all(t.isfinite().all() for t in (*outputs, *found.values()) if t is not None):
            raise ValueError("numbers that are not finite")
        return [o.detach() for o in outputs], [found.get(id(leaf)) for leaf in leaves]

    def _batch(self, scale: float) -> list[Tensor]:
        return [self._random(tensor, scale) for _, tensor in tensors_in(self.given)]

    def _number(self, number: Any, samples: int) -> Any:
        if not is_symbolic(number):
            return number
        known = value_with(number, dict.fromkeys(self.symbols, samples))
        if known is None and not set(self.symbols).isdisjoint(symbols_in(number)):
            raise ValueError("a size of which the samples are a part")
        return captured_value(number) if known is None else known

    def _random(self, like: Tensor, scale: float) -> Tensor:
        shape = [self._number(size, sum(_SIZES)) for size in like.shape]
        if like.dtype.is_floating_point:
            return torch.randn(shape, dtype=like.dtype) * _size(scale, like)
        return torch.randint(2, shape).to(like.dtype)

    def _parts(self, tensor: Tensor, label: Label) -> list[Tensor]:
        return slices(tensor, label, _SIZES) if isinstance(label, Rows) else [tensor] * len(_SIZES)


def _size(scale: float, like: Tensor) -> float:
    """``scale``, but at most the largest number whose square the type of ``like`` can hold.

    Args:
        scale: a magnitude to try.
        like: a floating-point tensor.
    """
    return min(scale, math.sqrt(torch.finfo(like.dtype).max))


def _weights(output: Tensor, label: Rows, samples: int, start: int) -> Tensor:
    """Factors by which the entries of an output go into the loss: different ones for each sample.

    With equal factors a gradient that is a mean over samples would look like that of one sample.

    Args:
        output: an output of the operation.
        label: the dimension of its samples.
        samples: how many samples it has.
        start: index of the first of these samples in the batch.

    Returns:
        A tensor that broadcasts to the output.
    """
    each = output.shape[label.dim] // samples
    weights = torch.arange(start + 1, start + 1 + samples).repeat_interleave(each)
    shape = [1] * output.dim()
    shape[label.dim] = -1
    return weights.view(shape).to(output.dtype)


def _is_own(
    label: Label, whole: Tensor, among: Tensor, *parts: Tensor, summed: bool = False
) -> bool:
    """Whether a result for the batch agrees with those for its two halves, run alone.

    Also, other samples in the second half must not change the first half of the result.

    Args:
        label: where the samples are in the result.
        whole: the result for the batch.
        among: the result for the batch with other samples in its second half.
        parts: the results for each half alone.
        summed: whether a result without samples must be the sum of those for the halves (a
            gradient); else it must equal them.
    """
    if not isinstance(label, Rows):
        together = sum(parts[1:], parts[0]) if summed else parts[0]
        return _close(together, whole) and (summed or all(_close(p, whole) for p in parts))
    # other neighbours must not change a bit; another size of the batch may, by rounding
    first, changed = (slices(tensor, label, _SIZES)[0] for tensor in (whole, among))
    return torch.equal(first, changed) and _close(joined(parts, label), whole)


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, and differ by rounding at most."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    precision = torch.finfo(one.dtype).eps ** 0.5
    largest = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=precision, atol=precision * largest, equal_nan=True)
