"""Where the samples of a batch are in a tensor.

A micro-batch has some of the samples of a batch. A tensor that is made of the batch may be the same
in all micro-batches; or it has a dimension in which every sample has entries of its own
(:class:`Rows`), so that the tensor of the whole batch can be cut into those of the micro-batches,
and joined of them; or it is neither, since samples have met (``MEET``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Places:
    """The entries of a tensor of integers are places in a dimension that is the samples'.

    A place is an index. In a micro-batch the entries are places in the micro-batch's dimension, so
    that they are usable only as an index.

    Attributes:
        outer: `Rows.outer` of that dimension.
        size: the size of that dimension, an expression.
        picked: `Rows.picked` of that dimension.
        column: the only column (in dimension 1) that has places; ``None``: all entries are places.
    """

    outer: Any
    size: Any
    picked: Any = None
    column: int | None = None


@dataclass(frozen=True)
class Rows:
    """One dimension of a tensor is the samples'.

    For B samples its size is ``outer * B * k``, and entry ``(o * B + i) * k + j`` is made of sample
    i alone. (``outer`` is 1 as a rule. It is T where a tensor of T steps and B samples, in this
    order, was made one of T * B rows.)

    Attributes:
        dim: the dimension.
        outer: an integer, or an expression of sizes.
        places: the dimension that the entries are places in, if they are, as in
            ``torch.arange(B)``.
        picked: what has picked the entries (a mask, an order), if they are not those of all samples
            in order. Each is made of one sample alone, but nobody knows of which; those of two
            tensors are the same only if the same has picked them. A micro-batch picks its own.
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
        """Whether tensors of micro-batches can be joined to that of the whole batch."""
        return self.places is None and self.picked is None

    @property
    def is_ordered(self) -> bool:
        """Whether an order of all samples, not a mask, has picked the entries."""
        return isinstance(self.picked, int)

    def at(self, dim: int, *, places: bool = False) -> Rows:
        """The same samples in another dimension; with ``places``, entries still are places."""
        return replace(self, dim=dim, places=self.places if places else None)


@dataclass(frozen=True)
class Counts:
    """The label of a histogram of numbers by which entries of samples were sorted.

    Attributes:
        picked: the order that the sort gives the samples.
        summed: whether counts are cumulative: each with those of all smaller numbers.
    """

    picked: Any
    summed: bool = False


@dataclass(frozen=True)
class Reason:
    """Why samples have met in an operation, or may have.

    Attributes:
        how: in words.
        instead: a sentence that says what to write instead, if it could only not be proven that
            they stay apart; empty: they were seen to meet.
    """

    how: str
    instead: str = ""


class _Meet(Enum):
    MEET = "samples meet"


MEET = _Meet.MEET
"""Samples have met, or it is not known that they have not."""

Label = Rows | Counts | _Meet | None
"""What is known of a tensor's samples; ``None``: it is the same in all micro-batches."""
