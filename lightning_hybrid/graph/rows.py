"""Where the samples of a batch are in a tensor.

A micro-batch has some of the samples of a batch. A tensor that is computed from the batch is one of
these:

* the same in all micro-batches (``None``);
* with a dimension in which each sample has entries of its own (:class:`Rows`), so that the tensor
  of the whole batch can be split into those of the micro-batches, and joined from them;
* neither: samples have met, or it could not be shown that they have not (``MEET``).

In the backward of an ``autograd.Function`` a tensor may also be a sum over samples (``SUMMED``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Places:
    """A description of an integer tensor whose entries are indices into a dimension of samples.

    In a micro-batch they are indices into the dimension of the micro-batch, so other numbers: they
    must be used for indexing only.

    Attributes:
        outer: `Rows.outer` of the dimension that they are indices into.
        size: the size of that dimension, an expression.
        picked: `Rows.picked` of that dimension.
        column: the only column (index in dimension 1) whose entries are such indices; ``None``: all
            entries are.
    """

    outer: Any
    size: Any
    picked: Any = None
    column: int | None = None


@dataclass(frozen=True)
class Rows:
    """The label of a tensor in which one dimension holds the samples.

    For B samples its size is ``outer * B * k``, and entry ``(o * B + i) * k + j`` is made of sample
    i alone. (``outer`` is 1 as a rule. It is T where a tensor of T steps and B samples, in this
    order, was made one of T * B rows.)

    Attributes:
        dim: the dimension.
        outer: how often all samples are repeated; an integer, or an expression of sizes.
        places: if the entries are themselves indices into a dimension of samples, as in
            ``torch.arange(B)``, which dimension that is; ``None``: they are ordinary values.
        picked: a key for what has picked the entries (a mask, an order); ``None``: they are those
            of all samples in order. Each picked entry is made of one sample alone, but it is not
            known of which. Entries of two tensors belong together only if their keys are equal. A
            micro-batch picks its own.
        is_sorted: whether the entries are the sorted numbers from which the order ``picked`` comes,
            or places with equal steps from 0 on.
    """

    dim: int
    outer: Any = 1
    places: Places | None = None
    picked: Any = None
    is_sorted: bool = field(default=False, compare=False)

    @property
    def plain(self) -> bool:
        """Whether tensors of micro-batches can be joined into that of the whole batch.

        They cannot if the entries are indices of samples (`places`), or were `picked`.
        """
        return self.places is None and self.picked is None

    @property
    def is_ordered(self) -> bool:
        """Whether an order of all entries (and not a mask) has picked them."""
        return isinstance(self.picked, int)

    def at(self, dim: int, *, places: bool = False) -> Rows:
        """The same samples, but in dimension ``dim``.

        Args:
            dim: the dimension.
            places: whether to keep `places`; else the entries count as ordinary values.
        """
        return replace(self, dim=dim, places=self.places if places else None)


@dataclass(frozen=True)
class Counts:
    """The label of a tensor that says how many entries each group has, when sorted by group.

    Entries of samples were sorted by the numbers of their groups, as a mixture of experts sorts
    them. The tensor is the histogram (``histc``) of the sorted numbers, or their cumulative sum.

    Attributes:
        picked: the key of the order in which the entries are sorted (`Rows.picked`).
        summed: whether the counts are cumulative: each with those of all smaller numbers.
    """

    picked: Any
    summed: bool = False


@dataclass(frozen=True)
class Reason:
    """Why samples have met in an operation, or may have.

    Attributes:
        how: what the operation does, for brackets behind its name: "random numbers that all samples
            share"; or the name of torch's operator.
        instead: advice to the user, a sentence, if they may only have met (it could not be proven
            that they stay apart); empty: they have certainly met.
    """

    how: str
    instead: str = ""


class _Meet(Enum):
    MEET = "samples meet"


MEET = _Meet.MEET
"""Samples have met, or it is not known that they have not."""


class _Sum(Enum):
    SUMMED = "a sum over samples"


SUMMED = _Sum.SUMMED
"""The tensor is a sum of terms, each made of one sample alone, as the gradient of a weight must be.

So the one of the whole batch is the sum of those of the micro-batches, which is what training adds
up.
"""

Label = Rows | Counts | _Meet | _Sum | None
"""Where the samples are in a tensor; ``None``: it is the same in all micro-batches."""
