"""Where the samples are in the results of torch's operators: one rule per kind of operator.

A label (:mod:`lightning_hybrid.graph.rows`) says where the samples are in a tensor. A rule is given
a call on labelled tensors, at least one with samples and none in which samples have met. It returns
the labels of the results, and must look at every tensor and number that the call takes. For what it
does not know it returns ``MEET``: the batch cannot be split there. An operator without a rule
counts as ``MEET`` too: the table may be incomplete, but must not be wrong. Where a rule sees that
samples do meet it returns `Labelling.met`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor

from lightning_hybrid._torch.symbols import is_symbolic
from lightning_hybrid._torch.tensors import arguments, schema
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.graph.rows import MEET, SUMMED, Counts, Label, Places, Rows

if TYPE_CHECKING:
    from lightning_hybrid.graph.row_proof import Labelling

FREE: Label = None


class OperatorArguments:
    """The arguments of one call of an operator, by their names in its schema, with its defaults.

    ``call["name"]`` is ``None`` for an argument that the operator does not have.

    Args:
        func: the operator, an overload of `torch.ops`, as dispatch modes get it.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.

    Attributes:
        values: all arguments by name.
        overload: the name of the overload, such as "default" or "dim".
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.values = arguments(func, args, kwargs)
        self.overload = str(func).rpartition(".")[2]

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def others(self, *names: str) -> list[Tensor]:
        """The tensors in all arguments except those with these names."""
        rest = {name: value for name, value in self.values.items() if name not in names}
        return [tensor for _, tensor in tensors_in(rest)]

    def numbers(self, without: Collection[str] = ()) -> Iterator[Any]:
        """All numbers and sizes in the arguments, except those named in ``without``."""
        for name, value in self.values.items():
            for one in value if isinstance(value, list | tuple) else [value]:
                if name not in without and (isinstance(one, int | float) or is_symbolic(one)):
                    yield one


Rule = Callable[["Labelling", OperatorArguments, Sequence[Tensor]], Label | list[Label]]
"""The rule of an operator: from the labels of the tensors that a call takes, those of its results.

It is given the mode that knows all labels (``f``), the arguments of the call, and the tensors that
the call has returned, in order. It returns a list with a label for each of these tensors, or a
single label, which all of them have.
"""


@cache
def divided(one: Any, other: Any) -> Any:
    """The quotient of two sizes if it is whole for any values of their symbols, else ``None``."""
    if other == 0:
        return None
    quotient = sympy.cancel(sympy.sympify(one) / other)
    return quotient if quotient.as_numer_denom()[1] == 1 else None


def _rows(f: Labelling, tensor: Tensor) -> Rows | None:
    label = f.label(tensor)
    return label if isinstance(label, Rows) else None


def _of_self(f: Labelling, call: OperatorArguments) -> Rows:
    """Where the samples are in the argument ``self`` of a call, which must have samples.

    For rules of operators that take no other tensor, so that this is the one with samples.
    """
    rows = f.label(call["self"])
    assert isinstance(rows, Rows)
    return rows


def _block(f: Labelling, tensor: Tensor, rows: Rows) -> Any:
    """How many entries one repetition of all samples has in their dimension: B * k of `Rows`.

    ``None`` if it is no whole number for all B.

    Args:
        f: the mode that knows the labels of all tensors.
        tensor: a tensor with samples.
        rows: its label.
    """
    return divided(f.size(tensor.shape[rows.dim]), rows.outer)


def _only(found: Sequence[Label]) -> Label:
    """The one label of all tensors that have samples; ``MEET`` if their labels differ.

    ``FREE`` if no tensor has samples.

    Args:
        found: the label of each tensor, those without samples among them.
    """
    those = {label for label in found if label is not FREE}
    return FREE if not those else those.pop() if len(those) == 1 else MEET


def _aligned(f: Labelling, tensor: Tensor, dims: int) -> Label:
    """The label of a tensor after it was broadcast (from the right) to ``dims`` dimensions.

    ``FREE`` if it has no samples.
    """
    rows = _rows(f, tensor)
    if rows is None:
        return FREE
    return rows.at(rows.dim + dims - tensor.dim(), places=True)


def _all_free(f: Labelling, tensors: Sequence[Tensor]) -> bool:
    return all(f.label(tensor) is FREE for tensor in tensors)


def dims_of(call: OperatorArguments, name: str = "dim") -> list[int]:
    """The dimensions that an operator works along, counted from 0; all if none are given.

    Args:
        call: its arguments.
        name: the argument with the dimensions.
    """
    dim, count = call[name], call["self"].dim()
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(count))
    return [each % max(count, 1) for each in (dim if isinstance(dim, list | tuple) else [dim])]


# ---------------------------------------------------------------- dimension by dimension


Keys = Sequence[Any]
"""A key (such as a letter) for each dimension of a tensor; ``None``: no dimension of another tensor
corresponds to it, since the operator works along it, or since it has size 1 and is broadcast."""


def moved(f: Labelling, call: OperatorArguments, given: Mapping[str, Keys], out: Keys) -> Label:
    """The label of a result, where dimensions of inputs and result with the same key correspond.

    In "ij, jk -> ik" every entry of the result with one i is made of entries with that i alone. So
    i may be the dimension of the samples: then all tensors that have an i must have their samples
    there, and all others must have no samples.

    Args:
        f: the mode that knows the labels of all tensors.
        call: the call.
        given: the keys of tensors, by the names of their arguments; all other tensors of the call
            must have no samples.
        out: the keys of the result.

    Returns:
        Where the samples are in the result, if all that is so and the result has that key; else
        ``MEET``.
    """
    found = set()
    for name, keys in given.items():
        if (rows := _rows(f, call[name])) is not None:
            size = f.size(call[name].shape[rows.dim])
            found.add((keys[rows.dim], rows.at(0, places=True), size))
    if len({key for key, *_ in found}) > 1:
        return f.met()
    if len(found) != 1 or not _all_free(f, call.others(*given)):
        return MEET
    key, those, _ = found.pop()
    if key is None or key not in out:
        return f.met()
    if any(key in keys for name, keys in given.items() if f.label(call[name]) is FREE):
        return MEET
    return those.at([*out].index(key), places=True)


def letters(spec: str) -> Rule:
    """Make the rule of operators that can be written like Einstein's sums.

    Args:
        spec: names dimensions by letters: "mat1:ij mat2:jk -> ik" those of the arguments ``mat1``
            and ``mat2``, and those of the first result. Samples may be in a dimension of which the
            result has the letter. A dot stands for any number of leading dimensions, which are
            broadcast from the right; "*" for every tensor of the call; further dimensions behind
            the letters are those that the operator works along. Further results have the label of
            the first one; with "-" at the end of the text, those whose sizes do not depend on the
            batch (seeds) have no samples.
    """
    given_to, _, results = spec.partition(" -> ")
    texts = dict(pair.split(":") for pair in given_to.split())
    out, _, others = results.partition(" ")

    def rule(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> list[Label] | Label:
        given = {
            name: _keys(texts.get(name, texts.get("*", "")), value)
            for name, value in call.values.items()
            if isinstance(value, Tensor) and ("*" in texts or name in texts)
        }
        found = moved(f, call, given, _keys(out, outs[0]))
        if found is MEET or not others:
            return found
        return [found, *(found if any(map(f.depends, o.shape)) else FREE for o in outs[1:])]

    return rule


def _keys(text: str, tensor: Tensor) -> Keys:
    """Give each dimension of a tensor its key, by the tensor's text in a spec of `letters`.

    A letter is the key of its dimension. The dimensions that the dot stands for get ..., -2, -1,
    from the right, so that those of several tensors match. ``None`` stands at dimensions after the
    last letter, and at those of size 1, which are broadcast. A tensor with fewer dimensions than
    letters has the last letters.

    Args:
        text: the tensor's text, such as '.ij'.
        tensor: the tensor.

    Returns:
        Such as ``[-2, -1, 'i', 'j']`` for '.ij' and four dimensions, ``['i', None]`` for 'i' and
        two.
    """
    count, names = tensor.dim(), text.removeprefix(".")
    ahead = range(len(names) - count, 0) if text != names else ()
    keys = [*ahead, *names, *[None] * (count - len(ahead) - len(names))]
    sizes = tensor.shape
    return [
        None if isinstance(size, int) and size == 1 else key
        for key, size in zip(keys[len(keys) - count :], sizes, strict=True)
    ]


def unreduced(rule: Rule) -> Rule:
    """Make the rule of a loss: with a reduction (its argument ``reduction``) samples meet in it.

    Args:
        rule: the rule for the loss without reduction.
    """
    return lambda f, call, outs: rule(f, call, outs) if call["reduction"] == 0 else f.met()


pointwise = letters("*:. -> .")


def fills(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    """Label the result of an operator that overwrites ``self`` unread (``copy_``, ``uniform_``).

    The result has its samples where the written values have theirs. If the values have no samples,
    the label of ``self`` stays.
    """
    label = _only([_aligned(f, t, outs[0].dim()) for t in call.others("self")])
    return f.label(call["self"]) if label is FREE and call["self"] is not None else label


# ---------------------------------------------------------------- views


def view(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    """Label the result of a view: in which dimension it has whole samples; ``MEET`` if in none.

    A view keeps samples apart if it cuts memory between them and nowhere else: as many entries as
    before must lie in front of the samples, and one dimension must hold whole samples.
    """
    tensor, out = call["self"], outs[0]
    if call.overload == "dtype":
        return MEET
    rows = _rows(f, tensor)
    if rows is None:
        return f.by_shape(out)
    # `before` entries of the memory stand in front of the samples. The result has the samples in
    # the first dimension that depends on the batch; `outer` is `before` by the entries ahead of it
    before, seen = sympy.sympify(rows.outer), sympy.Integer(1)
    for size in tensor.shape[: rows.dim]:
        before = before * f.size(size)
    for dim, size in enumerate(out.shape):
        if f.depends(size):
            outer = divided(before, seen)
            found = None if outer is None else replace(rows, dim=dim, outer=outer)
            return MEET if found is None else _only_column(found, out)
        seen = seen * f.size(size)
    return MEET


def expand(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    tensor, out = call["self"], outs[0]
    return f.by_shape(out) if f.label(tensor) is FREE else _aligned(f, tensor, out.dim())


def repeat(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    tensor = call["self"]
    out = outs[0]
    repeats = call["repeats"]
    rows = _aligned(f, tensor, out.dim())
    if not isinstance(rows, Rows):
        return f.by_shape(out)
    if any(f.depends(number) for number in repeats):
        return MEET
    return replace(rows, outer=rows.outer * f.size(repeats[rows.dim]))


def permute(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    rows, count = _of_self(f, call), call["self"].dim()
    order = list(range(count))
    if call["dims"] is not None:
        order = [dim % count for dim in call["dims"]]
    elif count > 1:
        one, other = 0, 1
        if call["dim0"] is not None:
            one, other = call["dim0"] % count, call["dim1"] % count
        order[one], order[other] = order[other], order[one]
    return rows.at(order.index(rows.dim), places=True)


def unsqueeze(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    rows, new = _of_self(f, call), call["dim"] % outs[0].dim()
    return rows.at(rows.dim + (new <= rows.dim), places=True)


def squeeze(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    tensor = call["self"]
    rows = _of_self(f, call)
    dims = dims_of(call)
    if call.overload != "default" and rows.dim in dims:
        return MEET  # a single sample's dimension would be dropped
    gone = [d for d in dims if isinstance(tensor.shape[d], int) and tensor.shape[d] == 1]
    return _only_column(rows.at(rows.dim - sum(d < rows.dim for d in gone), places=True), outs[0])


def _only_column(rows: Rows, out: Tensor) -> Label:
    """Label the result of a view of a tensor whose entries are possibly indices (`Places`).

    Args:
        rows: where the result has its samples, with the `Rows.places` of the tensor.
        out: the result.

    Returns:
        ``rows``; but if the tensor has indices in one column alone (`Places.column`), the result
        must be 1-d, as that column: then all entries of it are indices, else it is ``MEET``.
    """
    if rows.places is None or rows.places.column is None:
        return rows
    return replace(rows, places=replace(rows.places, column=None)) if out.dim() == 1 else MEET


def _part(f: Labelling, tensor: Tensor, rows: Rows, out: Tensor, start: Any) -> Label:
    """Label a piece of a tensor that was cut out along the dimension of the samples.

    The piece must hold whole repetitions of all samples; else samples count as having met.

    Args:
        f: the mode that knows the labels of all tensors.
        tensor: the tensor.
        rows: its label.
        out: the piece.
        start: index of the first entry of the piece in that dimension; 0 will do for a piece that
            begins where another one ends.
    """
    block = _block(f, tensor, rows)
    if block is None or divided(f.size(start), block) is None:
        return f.met()
    outer = divided(f.size(out.shape[rows.dim]), block)
    return f.met() if outer is None else replace(rows, outer=outer)


def slicing(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    tensor, rows = call["self"], f.label(call["self"])
    if not isinstance(rows, Rows):
        return MEET  # the first B entries of a table that all samples share
    start, step = call["start"], call["step"]
    start = 0 if start is None else start
    if call["dim"] % tensor.dim() == rows.dim:
        return _part(f, tensor, rows, outs[0], start) if step == 1 else f.met()
    return MEET if f.depends(start) or f.depends(call["end"]) or f.depends(step) else rows


def split(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label | list[Label]:
    tensor, rows = call["self"], _of_self(f, call)
    if call["dim"] % tensor.dim() == rows.dim:
        parts = [_part(f, tensor, rows, out, 0) for out in outs]  # (a part starts where one ends)
        return MEET if MEET in parts else parts
    return MEET if any(map(f.depends, call.numbers())) else rows


def unbind(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> list[Label] | Label:
    rows, dim = _of_self(f, call), call["dim"] % call["self"].dim()
    if rows.dim == dim:
        return f.met()
    found = rows.at(rows.dim - (dim < rows.dim))
    if rows.places is None:
        return found
    # the columns of `nonzero`
    which = [call["index"]] if call["index"] is not None else range(len(outs))
    here = replace(found, places=replace(rows.places, column=None))
    return [here if column == rows.places.column else found for column in which]


def cat(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    # (an empty tensor is left out: often the first state of a cache)
    tensors = [t for t in call["tensors"] if not _is_nothing(t)]
    rows = [f.label(t) for t in tensors]
    if not all(isinstance(each, Rows) for each in rows):
        return MEET  # a tensor that all samples share does not split with the others
    those = [each for each in rows if isinstance(each, Rows)]
    dim = call["dim"] % tensors[0].dim()
    if len({(each.dim, each.picked) for each in those}) > 1:
        return MEET
    if those[0].dim != dim:
        return _only(rows)
    blocks = {_block(f, tensor, each) for tensor, each in zip(tensors, those)}
    if len(blocks) > 1 or None in blocks:
        return MEET
    return replace(those[0], outer=sum((each.outer for each in those), sympy.Integer(0)))


def _is_nothing(tensor: Tensor) -> bool:
    """Whether a tensor is 1-d and empty: `torch.cat` leaves such a tensor out."""
    return tensor.dim() == 1 and isinstance(tensor.shape[0], int) and tensor.shape[0] == 0


def stack(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    rows, new = _only([f.label(t) for t in call["tensors"]]), call["dim"] % outs[0].dim()
    if not isinstance(rows, Rows) or not all(_rows(f, t) for t in call["tensors"]):
        return MEET
    return rows.at(rows.dim + (new <= rows.dim))


# ---------------------------------------------------------------- along dimensions


Mixed = Callable[[OperatorArguments], Iterable[int]]
"""A function that returns, for a call, the dimensions that the operator works along."""


def within(mixed: Mixed, first: str = "self") -> Rule:
    """Make the rule of operators that work along some dimensions of one argument.

    They may drop these dimensions. Samples meet if their dimension is one of these. All other
    tensors of the call must have no samples, or the label is ``MEET``.

    Args:
        mixed: returns these dimensions for a call.
        first: the name of the argument.
    """

    def rule(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
        count = call[first].dim()
        dims = {dim % max(count, 1) for dim in mixed(call)}
        keys = [None if dim in dims else dim for dim in range(count)]
        kept = [key for key in keys if outs[0].dim() >= count or key is not None]
        return moved(f, call, {first: keys}, kept)

    return rule


along = within(dims_of)
"""The rule of sums, softmax, sorting: they work along the dimensions in the argument ``dim``."""


def _padded(call: OperatorArguments) -> list[int]:
    """The dimensions that a call of `constant_pad_nd` makes longer or shorter, counted from 0."""
    pad, count = call["pad"], call["self"].dim()
    ends = [(count - 1 - place // 2, size) for place, size in enumerate(pad)]
    return [dim for dim, size in ends if not (isinstance(size, int) and size == 0)]


def batch_norm(
    f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]
) -> list[Label] | Label:
    """Label the results of batch normalisation.

    Samples count as not meeting, because its statistics are by definition those of a micro-batch:
    so statistics among the results are labelled as free of samples. The samples must be in
    dimension 0. For instance normalisation, which has them among the channels, they are in
    dimension 1: then statistics are of single samples, and hold them in dimension 0 (empty ones are
    free). Else all is ``MEET``.
    """
    rows = f.label(call["input"])
    if not isinstance(rows, Rows) or not rows.plain:
        return MEET
    others = call.others("input")
    if rows.dim == 0 and _all_free(f, others):
        # (gradients have no statistics of their own)
        return MEET if f.is_backward else [rows, *[FREE] * (len(outs) - 1)]
    of_channels = {f.label(tensor) for tensor in others} <= {FREE, rows.at(0)}
    if rows.dim == 1 and of_channels:
        return [rows, *[rows.at(0) if t.numel() else FREE for t in outs[1:]]]
    return MEET


_looked_up = letters("weight:ie indices:. -> .e")


def embedding(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label | list[Label]:
    """Label the result of looking up rows of a table (``embedding``).

    With ``scale_grad_by_freq`` samples meet: a gradient depends on how often all samples look up a
    row.
    """
    return f.met() if call["scale_grad_by_freq"] else _looked_up(f, call, outs)


def embedding_bag(
    f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]
) -> Label | list[Label]:
    """Label the results of ``embedding_bag``, which adds up rows of a table in bags.

    Each bag must have entries of one sample alone: the bags must begin at ``arange(0, B * k, k)``,
    for B samples with k entries each, in order. Else the labels are ``MEET``.
    """
    rows, starts = f.label(call["indices"]), f.label(call["offsets"])
    others = {f.label(t) for t in call.others("indices", "offsets", "weight")}
    bags = Rows(0, 1, Places(sympy.Integer(1), f.size(call["indices"].shape[0])))
    if rows != Rows(0) or others - {rows} or f.label(call["weight"]) is not FREE:
        return MEET
    if starts != bags or not starts.is_sorted or call["include_last_offset"]:
        return MEET
    if call["scale_grad_by_freq"]:
        return f.met()
    of_which = Rows(0, 1, Places(sympy.Integer(1), f.size(call["offsets"].shape[0])))
    return [rows, of_which, *[rows for _ in outs[2:]]]


def recurrent(f: Labelling, args: Sequence[Any]) -> list[Label]:
    """Label the outputs and last states of a recurrent layer.

    Args:
        f: the mode that knows the labels of all tensors.
        args: the positional arguments of the layer: the input, the states, the weights, and so on,
            as for the functions in `graph/recurrent_layers.py`.

    Returns:
        The labels of the outputs and of each state; all are ``MEET`` if the layer's arguments do
        not have their samples where they are expected.
    """
    value, states, weights = args[:3]
    states = list(states) if isinstance(states, list | tuple) else [states]
    rows, unpacked = f.label(value), isinstance(weights, list | tuple) and len(args) == 9
    # (a packed sequence interleaves the samples; states have samples in dimension 1)
    own = unpacked and rows == Rows(0 if args[8] else 1) and value.dim() == 3
    own = own and all(f.label(state) == Rows(1) for state in states) and _all_free(f, weights)
    return [rows, *[Rows(1) for _ in states]] if own else [MEET, *[MEET for _ in states]]


# ---------------------------------------------------------------- with indices


def gather(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    keys = range(call["index"].dim())
    table = [None if key == call["dim"] % max(len(keys), 1) else key for key in keys]
    return moved(f, call, {"self": table, "index": keys}, keys)


def scatter(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    """Label the result of ``scatter``, in which each sample must write to its own entries.

    That is so if tensor, indices and values have their samples in the same dimension, and it is not
    the one that is indexed; else the label is ``MEET``.
    """
    count = call["self"].dim()
    keys = [None if key == call["dim"] % max(count, 1) else key for key in range(count)]
    names = [name for name in ("self", "index", "src") if call[name] is not None]
    return moved(f, call, dict.fromkeys(names, keys), keys)


def _picks(call: OperatorArguments) -> tuple[list[int], list[Tensor]]:
    """The dimensions that an operator indexes by tensors, in order, and these tensors.

    Of a mask of several dimensions only the first one is listed.
    """
    if call["indices"] is None:  # (`index_select` and the like have one index)
        return [call["dim"] % max(call["self"].dim(), 1)], [call["index"]]
    picks = list(call["indices"])
    at = [place for place, pick in enumerate(picks) if pick is not None]
    return at, [picks[place] for place in at]


def index(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    at, tensors = _picks(call)
    if _is_own_mask(f, call["self"], at, tensors):
        return Rows(at[0], picked=f.picked_by(tensors[0], outs[0].shape[at[0]]))
    return _picked_from(f, call["self"], f.label(call["self"]), at, tensors)


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _is_own_mask(f: Labelling, tensor: Tensor, at: list[int], masks: list[Tensor]) -> bool:
    """Whether a tensor is indexed by one mask that has the same samples in the same dimension.

    Args:
        f: the mode that knows the labels of all tensors.
        tensor: what is indexed.
        at: the dimensions that are indexed; of a mask the first one.
        masks: the indices, which may be no masks.
    """
    rows, own = f.label(tensor), f.label(masks[0])
    if len(masks) > 1 or not isinstance(rows, Rows) or not isinstance(own, Rows):
        return False
    # (whether a place is 0 is another thing in a micro-batch)
    if own.places is not None or not _is_mask(masks[0]):
        return False
    same = f.size(tensor.shape[rows.dim]) == f.size(masks[0].shape[own.dim])
    return same and rows == own.at(own.dim + at[0])


def _picked_from(
    f: Labelling, tensor: Tensor, rows: Label, at: list[int], tensors: list[Tensor]
) -> Label:
    """The label of ``tensor[...]``, indexed by integers or by a mask without samples.

    With another mask it is ``MEET``.

    Args:
        f: the mode that knows the labels of all tensors.
        tensor: what is indexed.
        rows: its label.
        at: the dimensions that are indexed; of a mask the first one.
        tensors: the indices.
    """
    if rows is MEET:
        return MEET
    if any(_is_mask(t) for t in tensors):
        masked, shared = tensors[0].dim(), len(tensors) == 1 and f.label(tensors[0]) is FREE
        if not shared or not isinstance(rows, Rows) or at[0] <= rows.dim < at[0] + masked:
            return MEET
        return rows if rows.dim < at[0] else rows.at(rows.dim - masked + 1)
    # NumPy's rule: the dimensions of the indices replace theirs if those are adjacent, else lead
    count = max(t.dim() for t in tensors)
    adjacent = at == list(range(at[0], at[-1] + 1))
    start = at[0] if adjacent else 0
    found = _only([_aligned(f, t, count) for t in tensors if not _has_places(f, t)])
    places = [dim for dim, t in zip(at, tensors) if _has_places(f, t)]
    if rows is FREE:
        if places or not isinstance(found, Rows):
            return f.met() if places else MEET
        return found.at(found.dim + start)
    assert isinstance(rows, Rows)
    if places:  # each sample picks entries of its own
        picks = tensors[at.index(places[0])]
        where = _aligned(f, picks, count)
        if places != [rows.dim] or not _lead_to(f, picks, tensor) or not isinstance(where, Rows):
            return MEET
        where = where.at(where.dim)
        return where.at(where.dim + start) if found in (FREE, where) else MEET
    if found is not FREE or rows.dim in at:
        return MEET if found is MEET else f.met()
    if not adjacent or rows.dim > at[-1]:
        return rows.at(rows.dim - sum(place < rows.dim for place in at) + count)
    return rows


def _has_places(f: Labelling, tensor: Tensor) -> bool:
    rows = _rows(f, tensor)
    return rows is not None and rows.places is not None


def _lead_to(f: Labelling, picks: Tensor, tensor: Tensor) -> bool:
    """Whether the entries of ``picks`` are indices into the samples' dimension of ``tensor``."""
    label, rows = _rows(f, picks), _rows(f, tensor)
    if label is None or rows is None:
        return False
    return label.places == Places(rows.outer, f.size(tensor.shape[rows.dim]), rows.picked)


def index_put(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    """Label a tensor after values were written to ``tensor[...]``.

    The values must have their samples where reading ``tensor[...]`` would give them, or have none;
    then the tensor keeps its label. Else it is ``MEET``. After ``inverse[order] = arange(B)`` the
    entries of ``inverse`` are indices (`Places`).
    """
    tensor, value = call["self"], call["source"] if call["values"] is None else call["values"]
    at, tensors = _picks(call)
    rows = f.label(tensor)
    if not isinstance(rows, Rows):
        return f.met()
    if _is_own_mask(f, tensor, at, tensors):
        if at[0]:
            return MEET
        if value.dim() == 0 and f.label(value) is FREE:  # one number wherever the mask is true
            return rows
        own = value.dim() == tensor.dim() - tensors[0].dim() + 1
        shown = Rows(0, picked=f.picked_by(tensors[0], value.shape[0])) if own else None
        return rows if shown is not None and f.label(value) == shown else MEET
    there = _picked_from(f, tensor, rows, at, tensors)
    indexed = sum(t.dim() if _is_mask(t) else 1 for t in tensors)
    count = tensor.dim() - indexed + max(1 if _is_mask(t) else t.dim() for t in tensors)
    if not isinstance(there, Rows) or value.dim() > count:
        return MEET
    # (places that are added to other numbers are places no more)
    replaces = call["accumulate"] is False
    if replaces and tensor.dim() == 1 and f.is_whole(there.picked, tensor.shape[0]):
        size = f.size(tensor.shape[0])  # `inverse[order] = arange(len(order))`
        if f.label(value) == Rows(0, 1, Places(sympy.Integer(1), size)):
            return replace(rows, places=Places(sympy.Integer(1), size, there.picked))
    return rows if _aligned(f, value, count) in (FREE, there) else MEET


def nonzero(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    """Label the result of ``nonzero``: one row per entry that is not zero, of its indices.

    Its column for the dimension of the samples holds indices of samples (`Places`).
    """
    mask, rows = call["self"], _of_self(f, call)
    places = Places(rows.outer, f.size(mask.shape[rows.dim]), rows.picked, rows.dim)
    return Rows(0, 1, places, f.picked_by(mask, outs[0].shape[0]))


def sort(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> list[Label] | Label:
    """Label the results of sorting: the sorted values, and their indices.

    If a 1-d tensor is sorted along its samples, both are picked by the new order (`Rows.picked`).
    In all other cases this is the rule `along`.
    """
    tensor, rows = call["self"], _of_self(f, call)
    if rows != Rows(0, rows.outer) or tensor.dim() != 1:
        return along(f, call, outs)
    picked, size = f.ordered(outs[1]), f.size(tensor.shape[0])
    places = Places(rows.outer, size)
    ascending = not call["descending"]
    return [Rows(0, picked=picked, is_sorted=ascending), Rows(0, 1, places, picked)]


def floor_divide(
    f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]
) -> list[Label] | Label:
    """Label the result of ``//``: pointwise, but for a tensor of places (indices of entries).

    Where each sample has k entries, ``places // k`` are indices of samples (`Places` again).
    """
    rows, by = f.label(call["self"]), call["other"]
    if isinstance(by, Tensor) and _has_places(f, by):
        return MEET
    if not isinstance(rows, Rows) or rows.places is None:
        return pointwise(f, call, outs)
    divides = isinstance(by, int) and by > 0 and rows.places.column is None
    size = divided(rows.places.size, by) if divides else None
    if size is None or divided(size, rows.places.outer * f.batch) is None or rows.places.picked:
        return MEET
    return replace(rows, places=replace(rows.places, size=size))


def histogram(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    """Label the result of ``histc``: `Counts` if the numbers are sorted, else ``MEET``.

    The counts tell how many entries have each number.
    """
    rows, given = f.label(call["self"]), call["min"] == 0 and call["max"] > 0
    return Counts(rows.picked) if isinstance(rows, Rows) and rows.is_sorted and given else MEET


def cumsum(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> list[Label] | Label:
    counts = f.label(call["self"])
    return replace(counts, summed=True) if isinstance(counts, Counts) else along(f, call, outs)


def grouped_matrices(f: Labelling, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    """Label the result of `torch.nn.functional.grouped_mm`: each row times its group's matrix.

    The rows must be sorted by group, and the ends of the groups be cumulative `Counts` of that
    order.
    """
    first = "self" if call["self"] is not None else "input"
    rows, ends = f.label(call[first]), f.label(call["offs"])
    if not isinstance(rows, Rows) or rows.dim or rows.picked is None or call[first].dim() != 2:
        return MEET
    shared = _all_free(f, call.others(first, "offs"))
    return rows if shared and ends == Counts(rows.picked, summed=True) else MEET


# ---------------------------------------------------------------- sums over samples


def sum_over_samples(
    f: Labelling, func: Any, call: OperatorArguments, outs: Sequence[Tensor]
) -> Label:
    """Label the result of an operator that adds up samples: `SUMMED` if it does only that.

    These are ``sum``, and products of matrices and vectors that add up over the samples of both.
    For all others the label is ``MEET``.

    Args:
        f: the mode that knows the labels of all tensors.
        func: the operator, an overload of `torch.ops`.
        call: its arguments.
        outs: its results.
    """
    name = name_of(func) if func.namespace == "aten" else ""
    if any(out.dtype is torch.bool for out in outs):
        return MEET  # (whether any is true)
    if name == "sum":
        rows = _rows(f, call["self"])
        adds_up = rows is not None and rows.places is None and rows.dim in dims_of(call)
        return SUMMED if adds_up else MEET
    if name not in _PRODUCTS:
        return MEET
    found = set()
    for argument, dim in _PRODUCTS[name]:
        rows = _rows(f, call[argument])
        if rows is None or rows.places is not None or rows.dim != dim:
            return MEET
        found.add((rows.at(0), f.size(call[argument].shape[dim])))
    return SUMMED if len(found) == 1 else MEET


def of_sums(f: Labelling, func: Any, call: OperatorArguments, outs: Sequence[Tensor]) -> Label:
    """Label the result of an operator that takes sums over samples (`SUMMED`).

    It is such a sum too if the operator is linear in them: then it gives the same whether sums of
    micro-batches are added before or after it. All other tensors must be the same for all samples.
    For what is not known to be linear the label is ``MEET``.

    Args:
        f: the mode that knows the labels of all tensors.
        func: the operator, an overload of `torch.ops`.
        call: its arguments, of which at least one is such a sum.
        outs: its results.
    """
    name = name_of(func) if func.namespace == "aten" else ""
    given = {key: value for key, value in call.values.items() if isinstance(value, Tensor)}
    sums = {key for key, tensor in given.items() if f.label(tensor) is SUMMED}
    if not _all_free(f, call.others(*sums)) or any(map(f.depends, call.numbers())):
        return MEET  # (a number that depends on the batch: such as the last B entries)
    if not all((out.is_floating_point() or out.is_complex()) and out.itemsize > 1 for out in outs):
        return MEET  # (rounded to few numbers)
    if name in _LINEAR:
        linear = sums == {*given} == {"self"} and call.overload != "dtype"
    elif name in {"mul", *_PRODUCTS}:
        linear = len(sums) == 1
    elif name == "div":
        linear = sums == {"self"} and call["rounding_mode"] is None
    elif name in {"add", "sub", "where"}:
        linear = sums == {"self", "other"}
    else:  # entries are set to 0, whatever the samples
        zero = name == "masked_fill" and call.overload == "Scalar" and call["value"] == 0
        linear = zero and sums == {"self"}
    return SUMMED if linear else MEET


# ---------------------------------------------------------------- the table


def _names(text: str) -> set[str]:
    return set(text.split())


SHAPED = _names(
    "view _unsafe_view _reshape_alias expand repeat slice split split_with_sizes unsafe_split "
    "unsafe_split_with_sizes native_group_norm"
)
"""Operators that take sizes which may depend on the batch; their rules look at the sizes."""

FACTORIES = _names(
    "zeros ones empty rand randn randint full empty_permuted empty_strided new_zeros new_ones "
    "new_empty new_full new_empty_strided"
)
"""Operators that make a tensor of given sizes."""

LIKE = _names("zeros_like ones_like empty_like full_like rand_like randn_like randint_like")
"""Operators that make a tensor of the sizes of another one, without reading its entries."""

KEEPS_ORDER = _names("_to_copy clone detach alias")
"""Operators that return the values of their input, in the same order."""

KEEPS_POSITION = KEEPS_ORDER | _names("view _unsafe_view unsqueeze slice expand")
"""Operators whose results are indices (`Places`) if those of their input are."""

TAKES_PLACES = _names("index index_put index_select index_add index_copy")
"""Operators whose rules are right for indices that are `Places`."""

LOOKS_AT_PLACES = _names("floor_divide _embedding_bag _embedding_bag_forward_only")
"""Operators whose rules look at `Places` in all of their inputs."""

TAKES_COLUMNS = _names("select unbind squeeze view")
"""Operators that take the column of `Places` out of what `nonzero` returns."""

TAKES_COUNTS = _names("cumsum _grouped_mm grouped_mm_fallback")

_PRODUCTS = {
    "mm": (("self", 1), ("mat2", 0)),
    "bmm": (("self", 2), ("mat2", 1)),
    "mv": (("self", 1), ("vec", 0)),
    "dot": (("self", 0), ("tensor", 0)),
}
"""Products of matrices and vectors: the arguments, and the dimension of each that is added up."""

_LINEAR = KEEPS_ORDER | _names(
    "sum neg view _unsafe_view _reshape_alias t transpose permute unsqueeze squeeze expand select "
    "slice zeros_like"
)
"""Operators that are linear in their only tensor."""

_NOT = _names("isin equal max min copysign_ frexp")
"""Operators that torch tags as pointwise although they may look at other entries too."""

_OF_DIMENSIONS = re.compile(r"_?(?:\w*pool|\w*unpool|upsample_\w+|\w+_pad)([123])d\w*")
"""Names of operators that work on the last 1, 2 or 3 dimensions: pools, resizing, padding.

The group of a match is this number."""

_SPATIAL = [letters("*:.x -> .a"), letters("*:.xy -> .ab"), letters("*:.xyz -> .abc")]
"""The rules of operators that work on the last 1, 2 and 3 dimensions."""

_TABLE: dict[str, Rule] = {
    # (besides the operators that torch tags as pointwise)
    "lift_fresh_copy lift_fresh zero native_dropout bernoulli where masked_fill _conj _neg_view "
    "gelu softplus hardtanh hardswish glu_jvp polar complex prelu _prelu_kernel rrelu_with_noise "
    "resolve_conj log_sigmoid_forward bitwise_and pow poisson hardshrink softshrink": pointwise,
    "copy fill uniform normal random exponential log_normal cauchy geometric": fills,
    "mse_loss binary_cross_entropy binary_cross_entropy_with_logits smooth_l1_loss huber_loss "
    "soft_margin_loss": unreduced(pointwise),
    "nll_loss_forward nll_loss2d_forward": unreduced(letters("self:b target:b -> b -")),
    # views
    "view _unsafe_view _reshape_alias": view,
    "expand": expand,
    "repeat": repeat,
    "permute transpose t": permute,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "select unbind": unbind,
    "slice": slicing,
    "split split_with_sizes unsafe_split unsafe_split_with_sizes": split,
    "cat": cat,
    "stack": stack,
    "unfold": within(lambda call: [call["dimension"]]),
    "diagonal": within(lambda call: [call["dim1"], call["dim2"]]),
    "view_as_real": letters("self:. -> .c"),
    "view_as_complex": letters("self:.c -> ."),
    # along dimensions
    "_softmax _log_softmax _safe_softmax cumprod cummax cummin logcumsumexp argsort topk median "
    "mode kthvalue nanmedian glu _fft_r2c _fft_c2c _fft_c2r": along,
    "roll flip": within(lambda call: dims_of(call, "dims")),
    "constant_pad_nd": within(_padded),
    "native_layer_norm _fused_rms_norm": within(
        lambda call: range(-len(call["normalized_shape"]), 0), "input"
    ),
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update "
    "cudnn_batch_norm miopen_batch_norm": batch_norm,
    "native_group_norm convolution _convolution": letters("input:b -> b"),
    "mkldnn_convolution channel_shuffle native_channel_shuffle": letters("self:b -> b"),
    "pixel_shuffle pixel_unshuffle": letters("self:.cij -> .xyz"),
    "im2col": letters("self:.cij -> .xy"),
    "col2im": letters("self:.ij -> .xyz"),
    "grid_sampler_2d grid_sampler_3d": letters("input:bc grid:b -> bc"),
    "tril triu": letters("self:.ij -> .xy"),
    "multinomial": letters("self:.i -> .x"),
    # with weights, and of two tensors
    "mm": letters("self:ij mat2:jk -> ik"),
    "mv": letters("self:ij vec:j -> i"),
    "bmm": letters("self:bij mat2:bjk -> bik"),
    "addmm": letters("self:ik mat1:ij mat2:jk -> ik"),
    "baddbmm": letters("self:bik batch1:bij batch2:bjk -> bik"),
    "linear": letters("input:.i weight:oi bias:o -> .o"),
    "_cdist_forward": letters("x1:.ik x2:.jk -> .ij"),
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable": letters(
        "query:.hqf key:.hkf value:.hkv attn_mask:.hqk attn_bias:.hqk -> .hxv -"
    ),
    "isin": letters("elements:. -> ."),
    "bucketize searchsorted": letters("self:. -> ."),
    # with indices
    "embedding": embedding,
    "_embedding_bag _embedding_bag_forward_only": embedding_bag,
    "gather": gather,
    "scatter scatter_add scatter_reduce": scatter,
    "index index_select": index,
    "index_put index_add index_copy": index_put,
    "nonzero": nonzero,
    "sort": sort,
    "floor_divide": floor_divide,
    "histc": histogram,
    "cumsum": cumsum,
    "_grouped_mm": grouped_matrices,
}
RULES = {name: rule for names, rule in _TABLE.items() for name in names.split()}
RULES |= dict.fromkeys(KEEPS_ORDER, lambda f, call, outs: f.label(call["self"]))


# (that of `transformers` for a torch without `grouped_mm`)
CUSTOM_RULES: dict[str, Rule] = {"transformers.grouped_mm_fallback": grouped_matrices}
"""The rules of operators that are not torch's, by name: their backward must be the derivative."""


def custom_rule(operator: Any) -> Rule | None:
    """The rule in `CUSTOM_RULES` for an operator that is not torch's; ``None``: there is none."""
    return CUSTOM_RULES.get(".".join(str(operator).split(".")[:2]))


_INPLACE = re.compile(r"(?<=[a-z0-9])_$")


def name_of(func: Any) -> str:
    """The name of an operator, without namespace, overload and the underscore of in-place ones."""
    return _INPLACE.sub("", str(schema(func).name).partition("::")[2])


def rule_of(func: Any) -> Rule | None:
    """The rule for an operator, by its name or torch's tags.

    ``None``: no rule is known, so samples count as having met in it.
    """
    if func.namespace != "aten":
        return custom_rule(func)
    name = name_of(func)
    # before torch's tag: some operators with that tag have a rule of their own
    if name in RULES:
        return RULES[name]
    if (found := _OF_DIMENSIONS.fullmatch(name)) is not None:
        return _SPATIAL[int(found[1]) - 1]
    if torch.Tag.reduction in func.tags:
        return along
    return pointwise if torch.Tag.pointwise in func.tags and name not in _NOT else None
