"""A proof of which operations of a captured network treat samples one by one.

The graph runs once, operation by operation, on fake tensors (shapes without memory), and a dispatch
mode sees every operator of torch. Each result gets a label that says where the samples are in it
(:mod:`lightning_hybrid.graph.rows`), by the rule of the operator
(:mod:`lightning_hybrid.graph.row_rules`) from the labels of what the operator takes. Where nothing
is known, samples count as having met.

The backward of torch's operators keeps samples apart where their forward does. That of an
``autograd.Function`` may do anything, so it runs too, on gradients that are labelled like the
results of the forward (`_Walk._function`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from lightning_hybrid._torch.autograd import unwrapped
from lightning_hybrid._torch.graphs import higher_order_name, is_custom_operator
from lightning_hybrid._torch.symbols import expression, follows_from_values, is_symbolic
from lightning_hybrid._torch.tensors import (
    TorchDispatchMode,
    as_they_are,
    draws,
    python_dispatcher,
    schema,
    storage_key,
    version,
)
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.graph.graph import NetworkGraph
from lightning_hybrid.graph.graph_from_dynamo import rows_of_input
from lightning_hybrid.graph.operation_effects import (
    FAILURES,
    arguments_of,
    called,
    memory_of,
    modes_restored,
)
from lightning_hybrid.graph.recurrent_layers import RECURRENT
from lightning_hybrid.graph.row_rules import (
    FACTORIES,
    KEEPS_ORDER,
    KEEPS_POSITION,
    LIKE,
    LOOKS_AT_PLACES,
    SHAPED,
    TAKES_COLUMNS,
    TAKES_COUNTS,
    TAKES_PLACES,
    OperatorArguments,
    custom_rule,
    divided,
    name_of,
    of_sums,
    recurrent,
    rule_of,
    sum_over_samples,
)
from lightning_hybrid.graph.rows import MEET, SUMMED, Counts, Label, Places, Reason, Rows

_FUNCTION = "autograd_function_apply"
"""The operator that stands for a call of an ``autograd.Function``."""

_FOLLOWED = {
    _FUNCTION,
    "tag_activation_checkpoint",
    "wrap_activation_checkpoint",
    "wrap",
    "invoke_subgraph",
    "wrap_with_set_grad_enabled",
    "wrap_with_autocast",
}
"""Operators that take a graph and compute exactly what it does, forward and backward; and calls of
an ``autograd.Function``, which take two, one for each way."""


_LOST = "a size of the batch became a constant"

_OF_SHAPES = "Compute what its shapes follow from before the call of the network."
_UNKNOWN = "Write it with other operators of torch."
_NOT_FOLLOWED = "Keep the batch a dimension of its own, and index by each sample's own (gather)."
_CUSTOM = Reason(
    "a custom operator: what it computes is not known",
    "Write it with torch's own operators, inside of an autograd.Function if its backward is "
    "another one.",
)
_TAKES_GRAPHS = Reason("what it does with its graphs is not followed", "Write it without them.")
_WRITES_BACKWARD = Reason(
    "its backward changes what it is given in place", "Have the backward change a copy."
)
_NO_SUM = Reason(
    "its backward may give a weight a gradient that is no sum over samples",
    "Use sums, products and matrix products of gradients and samples there.",
)
_ELSEWHERE = Reason("its backward may give a sample the gradient of another one", _NOT_FOLLOWED)


@dataclass
class Followed:
    """Where the samples are in the nodes of a graph, and where they meet; from `label_samples`.

    Samples meet in a node if its result depends on several samples in a way that micro-batches
    cannot reproduce.

    Attributes:
        labels: per node, the labels of the tensors in its result, in order; empty for numbers.
        why: per node in which samples first meet, or may meet, the reason. (In nodes computed from
            these they have met too, without an entry.)
        prologue: those nodes of ``early`` that must be computed for all samples at once.
        numbers: nodes that are numbers read from the values of samples.
        early: nodes that are computed from the inputs alone, without weights.
    """

    labels: dict[fx.Node, tuple[Label, ...]] = field(default_factory=dict)
    why: dict[fx.Node, Reason] = field(default_factory=dict)
    prologue: set[fx.Node] = field(default_factory=set)
    numbers: set[fx.Node] = field(default_factory=set)
    early: set[fx.Node] = field(default_factory=set)

    def meets(self, node: fx.Node) -> bool:
        """Whether samples have met in what a node returns, or in what it was computed from."""
        return MEET in self.labels.get(node, ()) or node in self.numbers

    def label(self, node: fx.Node) -> Label:
        """Where the samples are in a node that is one tensor.

        ``None`` if they are nowhere in it, and for a node that is a number or several tensors.
        """
        labels = self.labels.get(node, ())
        return labels[0] if len(labels) == 1 else None


def label_samples(graph: NetworkGraph, symbols: Sequence[Any]) -> Followed:
    """Find where the samples of a batch are in each node of a graph, by one run on fake tensors.

    Args:
        graph: the captured network.
        symbols: the size symbols to take for the number of samples; the first one then stands for
            all.
    """
    with as_they_are(), torch.inference_mode(False):
        return _Walk(graph, symbols).found


class _Walk:
    def __init__(self, graph: NetworkGraph, symbols: Sequence[Any]) -> None:
        self.found = Followed()
        self._values = dict[fx.Node, Any]()
        # what cannot be in the prologue: parameters and buffers, and what writes in place
        self._kept = {*graph.tensors, *(y.node for y in graph.layers if y.effects.writes)}
        self._early = self.found.early
        self._sizes: set[fx.Node] = set()  # nodes that are a number of picked entries
        self._graph = graph
        self._run = Labelling(symbols)
        self._copies = dict[fx.GraphModule, fx.GraphModule]()  # from `_followed`, per nested graph
        examples: list[Any] = [node.meta.get("example_value") for node in graph.place]
        fake = next(e.fake_mode for e in examples if hasattr(e, "fake_mode"))
        self._env = fake.shape_env
        self._known = {s for e in examples for s in _symbols_of(e)} | set(symbols)
        with modes_restored(), quiet(), fake, self._env.suppress_guards(), torch.enable_grad():
            for node in graph.graph.nodes:
                if node.op != "output":
                    self._take(node)
            for node in self._values:  # again: later writes in place may have changed labels
                self._note(node)

    def _take(self, node: fx.Node) -> None:
        example = node.meta.get("example_value")
        # (a parameter is not early, so nothing computed from weights is)
        if node not in self._kept and self._early.issuperset(node.all_input_nodes):
            self._early.add(node)
        if node.op == "placeholder":
            self._values[node] = self._placeholder(node, example)
        elif node.op == "get_attr":
            is_tensor = isinstance(example, Tensor)
            attributes = self._graph.attributes
            self._values[node] = example if is_tensor else attributes[str(node.target)]
        elif node.meta.get("scalar"):
            # (not run: `int(size)` would give the size at the capture as a plain number)
            self._values[node] = example
            unknown = _symbols_of(example) - self._known
            if any(map(self.found.meets, node.all_input_nodes)) or (
                unknown and any(self._has_samples(n) for n in node.all_input_nodes)
            ):
                self.found.numbers.add(node)
                self._run.tainted |= unknown
            return
        else:
            self._compute(node, example)
        self._note(node)

    def _note(self, node: fx.Node) -> None:
        tensors = [tensor for _, tensor in tensors_in(self._values[node])]
        self.found.labels[node] = tuple(self._run.label(unwrapped(t)) for t in tensors)

    def _has_samples(self, node: fx.Node) -> bool:
        return any(label is not None for label in self.found.labels.get(node, ()))

    def _placeholder(self, node: fx.Node, example: Any) -> Any:
        if not isinstance(example, Tensor):
            return example
        if example.layout is not torch.strided or example.is_nested:
            self._run.set(example, MEET)
            return example
        # a new tensor: the run may write into it, and the example belongs to TorchDynamo
        value = torch.empty_strided(
            example.shape, example.stride(), dtype=example.dtype, device=example.device
        )
        symbols = self._run.symbols
        label: Label = None if node in self._graph.tensors else rows_of_input(node, symbols)
        if label is None and not _symbols_of(example).isdisjoint(symbols):
            label = MEET  # such as a matrix of samples by samples
        self._run.set(value, label)
        return value

    def _compute(self, node: fx.Node, example: Any) -> None:
        # 1. Run the node; have each of its operators labelled by the rules. Where it fails, nothing
        #    is known, and the example that TorchDynamo has noted stands for its result.
        run = self._run
        args, kwargs = arguments_of(node, self._values)
        given = [unwrapped(tensor) for _, tensor in tensors_in((args, kwargs))]
        has_samples = any(run.label(tensor) is not None for tensor in given)
        unknown = _unknown(node, args, has_samples)
        for shapes_of in (nullcontext, python_dispatcher):
            run.begin()
            try:
                with shapes_of():
                    self._values[node] = self._value(node, args, kwargs, example)
                why = run.why if unknown is None else unknown
                break
            except FAILURES as error:
                # a comparison in an operation that fails may have fixed the batch's size for good
                for symbol in run.symbols:
                    self._env.replacements.pop(symbol, None)
                self._env.fake_tensor_cache.clear()  # (it does not tell the two ways apart)
                text = str(error).strip().partition("\n")[0]
                why = Reason(f"without values {type(error).__name__}: {text:.60}", _OF_SHAPES)
                self._values[node] = example
                if node in self._kept:  # (it may have written, and must not write again)
                    for tensor in given:
                        run.spoil(tensor)
                    break
        # 2. The rules decide, or the prologue takes the node.
        self._decide(node, why)

    def _decide(self, node: fx.Node, why: Reason | None) -> None:
        """Decide whether the prologue computes a node, or whether samples meet in it; note it.

        (The prologue is what the driver computes for all samples before the stages.) The decision
        goes into `Followed` and into the labels of the node's results.

        Args:
            node: a node that has run, and whose results are labelled by rules.
            why: the reason for which samples meet in it, or may; ``None``: the rules give none.
        """
        run = self._run
        tensors = [unwrapped(tensor) for _, tensor in tensors_in(self._values[node])]
        if run.draws and tensors and all(run.label(tensor) is None for tensor in tensors):
            why = Reason("random numbers that all samples share")
        value = self._values[node]
        if not tensors and (run.reads or not run.tainted.isdisjoint(_symbols_of(value))):
            self.found.numbers.add(node)
            run.tainted |= _symbols_of(node.meta.get("example_value")) - self._known
            if run.is_count(value):
                self._sizes.add(node)
        met = run.draws or why or MEET in map(run.label, tensors)
        if met and self._is_prologue(node, tensors):
            return
        # (numbers of picked entries are no reason: the rules know them)
        meets = any(taken in self.found.numbers - self._sizes for taken in node.all_input_nodes)
        if meets or why != run.why:
            for tensor in tensors:
                run.spoil(tensor)
        if why is not None:
            self.found.why[node] = why

    def _value(self, node: fx.Node, args: Any, kwargs: Any, example: Any) -> Any:
        """Run a node inside of the labelling mode; returns its result, with its tensors labelled.

        Args:
            node: the node.
            args: its positional arguments.
            kwargs: its keyword arguments.
            example: the result that TorchDynamo has noted.

        Raises:
            RuntimeError: a size that depends on the batch has become a constant in the run.
        """
        run = self._run
        # (a recurrent layer is one operation with a rule of its own, and is not run)
        if node.target in RECURRENT:
            run.draws = bool(args[5] and args[6])
            for tensor, label in zip(example, recurrent(run, args), strict=True):
                run.set(tensor, label)
            return example
        with run:
            if higher_order_name(node.target) in _FOLLOWED:
                args = [self._followed(a) if isinstance(a, fx.GraphModule) else a for a in args]
                value = self._target(node)(*args, **kwargs)
            else:
                value = called(node, args, kwargs)
        # (padding under autograd turns sizes into plain numbers without an error)
        pairs = zip(tensors_in(value), tensors_in(example))
        sizes = [pair for (_, t), (_, e) in pairs for pair in zip(t.shape, e.shape)]
        if any(self._env.replace(symbol).is_number for symbol in run.symbols) or any(
            run.depends(then) and not run.depends(now) for now, then in sizes
        ):
            raise RuntimeError(_LOST)
        return value

    # ------------------------------------------------------------------ an autograd.Function

    def _target(self, node: fx.Node) -> Any:
        """What to call for a node: `_function` in the place of a call of an autograd.Function."""
        return self._function if higher_order_name(node.target) == _FUNCTION else node.target

    def _followed(self, module: fx.GraphModule) -> fx.GraphModule:
        """A copy of a nested graph in which `_function` is called for each autograd.Function."""
        if module not in self._copies:
            graph = fx.Graph()
            graph.output(graph.graph_copy(module.graph, {}))
            copy = self._copies[module] = fx.GraphModule(module, graph)
            for node in graph.nodes:
                if node.op == "call_function":
                    node.target = self._target(node)
            for name, nested in [*copy.named_children()]:
                if isinstance(nested, fx.GraphModule):
                    setattr(copy, name, self._followed(nested))
            copy.recompile()
        return self._copies[module]

    def _function(
        self, forward: fx.GraphModule, backward: fx.GraphModule, *given: Any, **_: Any
    ) -> Any:
        """Run an ``autograd.Function`` inside of the labelling mode, forward and backward.

        The backward runs on gradients that have their samples where the results of the forward have
        theirs. Then the gradients that it returns must have theirs where the inputs have them. If
        not, samples have met in the results.

        A result or an input without samples is used by all of them: its gradient is a sum over
        samples, `SUMMED`.

        Args:
            forward: the graph of the forward. It returns the results, and what the backward takes.
            backward: the graph of the backward. It takes the gradient of each result and what the
                forward has kept, and returns a gradient, or ``None``, for each input.
            given: the inputs, tensors and numbers.

        Returns:
            The results of the forward.

        Raises:
            RuntimeError: the graphs are not as described above, or cannot be followed.
        """
        run = self._run
        tensors = [tensor for _, tensor in tensors_in(given)]
        if any(unwrapped(tensor) is not tensor for tensor in tensors):
            raise RuntimeError("an autograd.Function in a transformation of functions")
        with torch.no_grad():
            results, kept = self._interpreted(forward, given)
            outputs = [tensor for _, tensor in tensors_in(results)]
            reason = None
            if MEET not in map(run.label, (*tensors, *outputs)):
                before, run.why = (run.draws, run.reads, run.why), None
                run.draws, run.is_backward = False, True
                try:
                    reason = self._why_backward(backward, given, results, kept)
                finally:
                    run.is_backward = False
                run.draws, run.reads, run.why = before
                if reason is None:
                    return results
        run.why = run.why or reason
        for tensor in outputs:
            run.spoil(tensor)
        return results

    def _why_backward(
        self, backward: fx.GraphModule, given: Sequence[Any], results: Any, kept: Sequence[Any]
    ) -> Reason | None:
        """Why samples meet, or may, in the backward of an autograd.Function; ``None``: they do not.

        Args:
            backward: its graph; see `_function`.
            given: the inputs of the forward.
            results: what the forward has returned.
            kept: what it has kept for the backward.
        """
        run = self._run
        incoming = [self._gradient(result) for result in _several(results)]
        # (by memory: a write through `data` does not show in version counters)
        memory = {storage_key(t.untyped_storage()) for _, t in tensors_in((incoming, kept))}
        run.written.clear()
        found = self._interpreted(backward, (*incoming, *kept))
        if run.draws:
            return Reason("its backward draws random numbers", "Draw them in its forward.")
        if not memory.isdisjoint(run.written):
            return _WRITES_BACKWARD
        for tensor, gradient in zip(given, _several(found), strict=True):
            needs = isinstance(tensor, Tensor) and (
                tensor.is_floating_point() or tensor.is_complex()
            )
            if gradient is None or not needs:
                continue
            own, label = run.label(tensor), run.label(gradient)
            if label is MEET and run.why is not None:
                other = run.why.instead if isinstance(own, Rows) else _NO_SUM.instead
                return Reason(f"in its backward: {run.why.how}", run.why.instead and other)
            if isinstance(own, Rows) and label != replace(own, places=None):
                return _ELSEWHERE
            # (autograd adds up the entries of a gradient that is larger than the weight)
            if not isinstance(own, Rows) and not isinstance(label, Rows) and label is not SUMMED:
                return _NO_SUM
        return None

    def _gradient(self, result: Any) -> Tensor | None:
        """A labelled stand-in for the gradient of a result of an autograd.Function."""
        if not isinstance(result, Tensor):
            return None
        label, gradient = self._run.label(result), torch.empty_like(result)
        label = replace(label, places=None, is_sorted=False) if isinstance(label, Rows) else SUMMED
        self._run.set(gradient, label)
        return gradient

    def _interpreted(self, module: fx.GraphModule, given: Sequence[Any]) -> Any:
        """Run the graph of a forward or backward, and check that all its tensors are labelled.

        Args:
            module: the graph.
            given: its arguments; tensors without a label get ``None``.

        Raises:
            RuntimeError: it takes another number of arguments, or a tensor in it has no label.
        """
        if len(module.graph.find_nodes(op="placeholder")) != len(given):
            raise RuntimeError("an autograd.Function with other arguments than its backward")
        for _, tensor in tensors_in(given):
            self._run.set(tensor, self._run.label(tensor))
        return _Interpreter(module, self._run).run(*given)

    # ------------------------------------------------------------------ the prologue

    def _is_prologue(self, node: fx.Node, tensors: Sequence[Tensor]) -> bool:
        """Whether the driver can compute a node for all samples before the stages run.

        That needs a tensor computed from the inputs alone that can be split into micro-batches (or
        is the same in all). If so, the node is noted in `Followed.prologue`, and labelled by its
        shape.

        Args:
            node: the node.
            tensors: the tensors in its result.

        Returns:
            Whether it can. If not, nothing is noted.
        """
        labels = list(map(self._run.by_shape, tensors))
        is_tensor = isinstance(self._values[node], Tensor)  # (else ask its parts)
        if node not in self._early or not is_tensor or MEET in labels:
            return False
        for tensor, label in zip(tensors, labels):
            self._run.set(tensor, label)
        self.found.prologue.add(node)
        return True


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which torch does not log that operations fail on fake tensors.

    Here such failures are expected, and are no errors.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _Interpreter(fx.Interpreter):
    """Runs a graph operation by operation, and fails where a result has no label."""

    def __init__(self, module: fx.GraphModule, run: Labelling) -> None:
        super().__init__(module)
        self._run = run

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for _, tensor in tensors_in(value):
            if n.op == "get_attr":
                self._run.set(tensor, None)
            elif not self._run.has_label(tensor):
                raise RuntimeError(f"what {n.name!r} returns cannot be followed")
        return value


def _changed_in_place(func: Any, call: OperatorArguments) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an operator changes in place, each with the name of its argument."""
    for argument in schema(func).arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for _, tensor in tensors_in(call[argument.name]):
                yield argument.name, tensor


def _several(value: Any) -> Sequence[Any]:
    """What a forward or backward has returned, as several results."""
    return value if isinstance(value, tuple | list) else (value,)


def _unknown(node: fx.Node, args: Sequence[Any], has_samples: bool) -> Reason | None:
    """Why no rule can be right for a node that may do anything; ``None``: rules know it.

    Custom operators may do anything, also backward, and so may operators that take graphs and are
    not in `_FOLLOWED`.

    Args:
        node: the node.
        args: its positional arguments, graphs among them.
        has_samples: whether there are samples in its tensors. If not, only a gradient could mix
            samples.
    """
    name = higher_order_name(node.target)
    nested = [n for arg in args if isinstance(arg, fx.GraphModule) for n in _nodes_of(arg)]
    if name is not None and name not in _FOLLOWED:
        calls = any(higher_order_name(n.target) == _FUNCTION for n in nested)
        return _TAKES_GRAPHS if has_samples or calls else None
    # (nested custom operators that are given samples count as `MEET` in the labelling mode)
    mixes = any(_is_custom(n) and _needs_gradient(n) for n in (node, *nested))
    return _CUSTOM if mixes or (_is_custom(node) and has_samples) else None


def _is_custom(node: fx.Node) -> bool:
    return is_custom_operator(node.target) and custom_rule(node.target) is None


def _needs_gradient(node: fx.Node) -> bool:
    """Whether a tensor in the result of a node was computed from what requires a gradient."""
    return any(t.requires_grad for _, t in tensors_in(node.meta.get("example_value")))


def _nodes_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph, and those of the graphs nested in it."""
    for nested in module.modules():
        if isinstance(nested, fx.GraphModule):
            yield from nested.graph.nodes


def _symbols_of(value: Any) -> set[Any]:
    """The sympy symbols in a number, in a sequence of numbers, or in the shape of a tensor."""
    numbers = value.shape if isinstance(value, Tensor) else value
    numbers = numbers if isinstance(numbers, list | tuple) else [numbers]
    return {s for n in numbers if is_symbolic(n) for s in expression(n, {}).free_symbols}


class Labelling(TorchDispatchMode):
    """A dispatch mode that gives each result of an operator a label: where the samples are in it.

    Nodes of a graph are run inside of it, one after the other; call `begin` before each.

    Args:
        symbols: the sympy symbols that stand for the number of samples (a capture may make several
            for the same number).

    Attributes:
        batch: the first of the symbols, which stands for all of them in `size`.
        symbols: see above.
        tainted: symbols of sizes and numbers that follow from the values of samples.
        draws: whether the node that is running draws random numbers.
        reads: whether this node reads numbers from tensors in which there are samples.
        why: the first operator of this node in which samples meet, or may, as a `Reason`; ``None``:
            they meet in none of its operators, or have met before.
        is_backward: whether a backward runs, so that sums over samples are labelled as such
            (`SUMMED`); else samples meet in them.
        written: keys of the memory that the backward has changed in place (`storage_key`).
    """

    def __init__(self, symbols: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch = symbols[0]
        self.symbols = symbols
        self._same = dict.fromkeys(symbols, self.batch)
        self.written = set[int]()
        self.tainted: set[Any] = set()
        self._labels: dict[int, Label] = {}
        self._alive: list[Tensor] = []  # the `id` of a freed tensor could be given to another
        self._views: dict[int, list[Tensor]] = {}
        self._roots: dict[int, int] = {}  # per view with all entries in order: the tensor viewed
        self._counts: dict[Any, Any] = {}  # per key of picked entries, or of an order: their number
        self._sizes: dict[Any, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Reset `draws`, `reads` and `why`; to be called before a node runs."""
        self.draws = self.reads = self.is_backward = self._seen = False
        self.why: Reason | None = None

    # ------------------------------------------------------------------ what rules ask

    def label(self, tensor: Tensor) -> Label:
        """Where the samples are in a tensor; ``None``: it has none, or was never labelled."""
        return self._labels.get(id(tensor))

    def has_label(self, tensor: Tensor) -> bool:
        """Whether a tensor was labelled, also as one without samples."""
        return id(tensor) in self._labels

    def met(self) -> Label:
        """For rules: note that samples certainly meet in the running operator; returns ``MEET``.

        A rule that returns ``MEET`` without this call says that it does not know.
        """
        self._seen = True
        return MEET

    def size(self, number: Any) -> Any:
        """A size as a sympy expression, with `batch` in the place of each of `symbols`."""
        if not is_symbolic(number):
            return sympy.sympify(number)
        return expression(number, self._same)

    def depends(self, number: Any) -> bool:
        """Whether a number depends on the number of samples, or on values of samples."""
        return is_symbolic(number) and self._changes(self.size(number))

    def _changes(self, size: Any) -> bool:
        free = sympy.sympify(size).free_symbols
        return self.batch in free or not free.isdisjoint(self.tainted)

    def by_shape(self, tensor: Tensor) -> Label:
        """The label that a tensor's shape suggests: samples are in the dimension of the batch size.

        It is `Rows` if one size depends on the batch and is a multiple of its size; ``None`` if no
        size depends on the batch; else ``MEET``.
        """
        dims = [d for d, size in enumerate(tensor.shape) if self.depends(size)]
        label = None if not dims else Rows(dims[0]) if len(dims) == 1 else MEET
        return self.borne_out(label, tensor)

    def picked_by(self, mask: Tensor, count: Any) -> Any:
        """A key (for `Rows.picked`) of the entries that a mask picks.

        The same mask, as long as nothing is written to it, gives the same key, and picks the same
        number of entries each time.

        Args:
            mask: the mask, which has samples.
            count: the size that the picked entries have, usually a new symbol.
        """
        picked = self._roots.get(id(mask), id(mask)), version(mask)
        size = self._counts.setdefault(picked, self.size(count))
        new = _symbols_of(count)
        self.tainted |= new
        if self.size(count) != size and len(new) == 1:  # the same mask, counted anew
            self._same[new.pop()] = size
        return picked

    def ordered(self, order: Tensor) -> Any:
        """A key (for `Rows.picked`) of an order of entries; no other tensor has the same.

        Args:
            order: 1-d, the index of each entry in the original order.
        """
        self._counts[id(order)] = self.size(order.shape[0])
        return id(order)

    def is_count(self, number: Any) -> bool:
        """Whether a number is how many entries some mask or order has picked."""
        return is_symbolic(number) and self.size(number) in self._counts.values()

    def is_whole(self, picked: Any, size: Any) -> bool:
        """Whether ``picked`` is an order (no mask) of as many entries as a dimension has.

        Args:
            picked: a key, as in `Rows.picked`; for ``None`` the answer is no.
            size: the size of the dimension.
        """
        return isinstance(picked, int) and self._counts[picked] == self.size(size)

    # ------------------------------------------------------------------ labels

    def set(self, tensor: Tensor, label: Label) -> None:
        if id(tensor) not in self._labels:
            self._alive.append(tensor)
            self._views.setdefault(memory_of(tensor)[0], []).append(tensor)
        self._labels[id(tensor)] = label

    def spoil(self, tensor: Tensor) -> None:
        """Label a tensor, and all tensors that share its memory, as ``MEET`` (samples have met).

        An entry may then depend on several samples, so no micro-batch can compute it.
        """
        self.set(tensor, MEET)
        for other in self._views[memory_of(tensor)[0]]:
            self.set(other, MEET)

    def _write(self, tensor: Tensor, label: Label) -> None:
        """Update labels after values were written into a tensor in place.

        If the values have their samples elsewhere than the tensor, samples have met in it and in
        all tensors that share its memory. Values that are the same for all samples may be written.

        Args:
            tensor: the tensor that was written to.
            label: where the samples are in the written values.
        """
        own = self.label(tensor)
        fits = label == own or (label is None and isinstance(own, Rows) and own.places is None)
        shown = self._views[memory_of(tensor)[0]]
        for other in shown:
            if isinstance(before := self.label(other), Rows):
                self.set(other, replace(before, is_sorted=False))
        if isinstance(label, Rows) and label.at(label.dim) == own and label.places != own.places:
            fits = all(other.shape == tensor.shape for other in shown)
            for other in shown:  # all entries are places now
                self.set(other, label)
        if label is not MEET and not fits and self.why is None:
            self.why = Reason("what is written there", _NOT_FOLLOWED)
        if label is MEET or not fits:
            self.spoil(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # 1. The tensors that the operator takes, before it may change them.
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        self.draws |= draws(func, args, kwargs)
        call = OperatorArguments(func, args, kwargs)
        seen: Any = call["self"]
        reshapes = torch.Tag.inplace_view in func.tags and isinstance(seen, Tensor)
        if reshapes:
            # a stand-in for a tensor whose shape is about to be changed in place
            call.values["self"] = other = seen.detach()
            self.set(other, self.label(seen))
        if self.is_backward:
            changes = _changed_in_place(func, call)
            self.written |= {storage_key(tensor.untyped_storage()) for _, tensor in changes}
        # 2. The labels of its results by its rule, if their shapes agree.
        self._seen, result = False, func(*args, **kwargs)
        outs = [tensor for _, tensor in tensors_in(result)]
        found = self._of(func, call, given, outs)
        labels = found if isinstance(found, list) else [found] * len(outs)
        labels = [self.borne_out(each, out) for each, out in zip(labels, outs, strict=True)]
        name = name_of(func)
        if name in ("view", "alias", "detach") and len(given) == 1:
            self._roots[id(outs[0])] = self._roots.get(id(given[0]), id(given[0]))
        # 3. Results of most operators are not sorted; samples may have met; writes in place.
        if name not in KEEPS_ORDER | {"sort", "arange"}:
            labels = [replace(r, is_sorted=False) if isinstance(r, Rows) else r for r in labels]
        if reshapes:
            call.values["self"] = seen
        if MEET in labels and self.why is None and not any(self.label(t) is MEET for t in given):
            unseen = _NOT_FOLLOWED if rule_of(func) else _UNKNOWN
            self.why = Reason(name, "" if self._seen else unseen)
        for tensor, label in zip(outs, labels):
            if any(tensor is one for one in given) and not reshapes:
                self._write(tensor, label)
            else:
                self.set(tensor, label)
        self._look_at_other_results(func, call, given, outs, result)
        return result

    def _look_at_other_results(
        self,
        func: Any,
        call: OperatorArguments,
        given: list[Tensor],
        outs: list[Tensor],
        result: Any,
    ) -> None:
        """Note what an operator changes without returning it, and the numbers that it returns.

        Args:
            func: the operator.
            call: its arguments.
            given: the tensors among them.
            outs: the tensors in its result.
            result: its result.
        """
        has_samples = any(self.label(t) is not None for t in given)
        if not has_samples:
            return
        # (running statistics may be those of a micro-batch, as in every pipeline)
        for name, tensor in _changed_in_place(func, call):
            is_statistic = name in ("running_mean", "running_var")
            if not any(tensor is out for out in outs) and not is_statistic:
                self.spoil(tensor)
        met = any(self.label(t) is MEET for t in (*given, *outs))
        is_number = isinstance(result, int | float | complex) or is_symbolic(result)
        if is_number and name_of(func) not in _OF_SIZES:
            self.reads = True
            self.tainted |= _symbols_of(result)
        if met:  # sizes that are new here follow from values
            for out in outs:
                self.tainted |= {s for s in _symbols_of(out) if follows_from_values(s)}

    def borne_out(self, label: Label, out: Tensor) -> Label:
        """Check a result's label by its shape; returns the label, or ``MEET`` if they disagree.

        A result without entries is labelled ``None`` instead of `Rows`.

        Args:
            label: the label by the operator's rule.
            out: the result.

        Raises:
            RuntimeError: a size that depends on the batch has become a constant in the run.
        """
        if label is MEET:
            return MEET
        if out.layout is not torch.strided or out.is_nested:
            return MEET
        # a check of all rules: one that is wrong about a shape is wrong about samples
        dims = [d for d, size in enumerate(out.shape) if self.depends(size)]
        if label is None or label is SUMMED:
            return MEET if dims else label
        if not dims and any(isinstance(s, int) and s == 0 for s in out.shape):
            return None  # (it is empty)
        if isinstance(label, Counts):
            return MEET if dims else label
        if not dims:
            raise RuntimeError(_LOST)
        if dims != [label.dim] or self._changes(label.outer):
            return MEET
        # whole repetitions of all samples, each with as many entries as any other
        count = self.batch if label.picked is None else self._counts[label.picked]
        each = divided(self.size(out.shape[label.dim]), label.outer * count)
        return MEET if each is None or self._changes(each) else label

    def _of(
        self, func: Any, call: OperatorArguments, given: list[Tensor], outs: list[Tensor]
    ) -> Label | list[Label]:
        # 1. Once samples have met, all that follows has met.
        labels = {self.label(tensor) for tensor in given}
        if MEET in labels:
            return MEET
        name = name_of(func)
        if func.namespace == "aten" and name == "arange" and self._is_range(call, outs):
            places = Places(sympy.Integer(1), self.size(call["end"]))
            return Rows(0, places=places, is_sorted=True)
        # 2. A number that follows from the batch is another one in a micro-batch: x / len(x).
        sizes = ("size", "stride") if name in FACTORIES else ()
        if name not in SHAPED and any(map(self.depends, call.numbers(without=sizes))):
            return self.met() if rule_of(func) else MEET
        if SUMMED in labels:
            return of_sums(self, func, call, outs)
        # 3. A result of inputs without samples is the same in all micro-batches.
        grows = any(self.depends(size) for out in outs for size in out.shape)
        if labels <= {None} and not grows:
            # whatever the operator; unless a number that follows from the batch says what to take
            return self.met() if any(map(self.depends, call.numbers())) else None
        # 4. Operators that only look at sizes; for others their rule.
        if func.namespace == "aten" and name in FACTORIES:
            return [self.by_shape(out) for out in outs]
        if func.namespace == "aten" and name in LIKE:
            like = self.label(call["self"])
            if not isinstance(like, Rows):
                return MEET
            plain = Rows(like.dim, like.outer)  # a new tensor has no order yet
            return plain if self.borne_out(plain, outs[0]) is plain else like.at(like.dim)
        known = self._is_known(name, call, labels) and (name in SHAPED or not labels <= {None})
        rule = rule_of(func) if known else None
        found = MEET if rule is None else rule(self, call, outs)
        if self.is_backward and found is MEET:
            return sum_over_samples(self, func, call, outs)
        return found

    def _is_known(self, name: str, call: OperatorArguments, labels: Collection[Label]) -> bool:
        """Whether an operator's rule is right for the `Places` and `Counts` among its inputs.

        Args:
            name: of the operator, from `name_of`.
            call: its arguments.
            labels: the labels of all tensors among them.
        """
        if any(isinstance(one, Counts) for one in labels):
            return name in TAKES_COUNTS | KEEPS_ORDER
        places = [one.places for one in labels if isinstance(one, Rows) and one.places]
        if not places:
            return True
        if any(one.column is not None for one in places):
            return name in TAKES_COLUMNS | KEEPS_ORDER
        own = self.label(call["self"])
        indexes = isinstance(own, Rows) and own.places is None
        return name in KEEPS_POSITION | LOOKS_AT_PLACES or (name in TAKES_PLACES and indexes)

    def _is_range(self, call: OperatorArguments, outs: list[Tensor]) -> bool:
        """Whether a call of ``arange`` counts samples, from 0.

        For B samples that is ``arange(B)``; ``arange(B * k)``, with k entries of each sample; and
        ``arange(0, B * k * s, s)``, the same in steps.
        """
        start, step = call["start"], 1 if call["step"] is None else call["step"]
        whole = (start is None or (type(start) is int and start == 0)) and type(step) is not float
        if not whole or not outs or self.depends(step) or not self.size(step).is_positive:
            return False
        count = self.size(outs[0].shape[0])
        each = divided(count, self.batch)
        fits = self.size(call["end"]) == count * self.size(step)
        return fits and each is not None and not self._changes(each)


_OF_SIZES = {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "dim", "is_contiguous"}
