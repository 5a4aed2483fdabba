"""Follows `requires_grad_` on a tensor that a network has computed, which TorchDynamo does not.

Such a call (``enable_input_require_grads`` of `transformers` and `peft` makes one, in a hook)
changes no number and no gradient of a weight, but for one thing: a region under re-entrant
activation checkpointing gives gradients only if an input of it requires one. So the call is
captured as a *mark* on the tensor. After the capture the marks tell which regions give gradients;
then they are dropped, and stages before the first trained weight have nothing to send back. (The
marked tensor itself gets no ``grad``.)
"""

import operator
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid._torch.graphs import is_region


def _mark(tensor: Tensor) -> Tensor:
    """Have a tensor require a gradient; returns it. In a captured graph this call is the mark."""
    return tensor.requires_grad_()


_allow_in_graph: Any = torch.compiler.allow_in_graph
_allow_in_graph(_mark)


class Marking(TorchFunctionMode):
    """A function mode, for captures, in which ``requires_grad_()`` is captured as a mark.

    Without it the capture would stop at such a call.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.requires_grad_ and (*args[1:], *kwargs.values()) in ((), (True,)):
            return _mark(args[0])
        return func(*args, **kwargs)


def resolve_marks(module: fx.GraphModule) -> bool:
    """Note for each checkpointed region whether it gives gradients, and drop the marks.

    Regions that give gradients get ``use_reentrant=False``; those that stay ``use_reentrant=True``
    give none.

    Args:
        module: a captured graph; changed.

    Returns:
        Whether that was possible. It is not if an input of the network itself is marked; then the
        graph is not changed.
    """
    given = module.graph.find_nodes(op="placeholder")
    marks = module.graph.find_nodes(op="call_function", target=_mark)
    if any(mark.args[0] in given for mark in marks):
        return False
    _resolve(module, [node for node in given if getattr(_example(node), "requires_grad", False)])
    return True


def may_hide_marks(module: fx.GraphModule) -> bool:
    """Whether marks may be missing from a graph that was captured without :class:`Marking`.

    TorchDynamo assumes that every region with trained weights gives gradients. A
    ``requires_grad_()`` on the result of a region then seems to change nothing, and is left out of
    the graph, although the region may give none.

    Args:
        module: the graph, after `resolve_marks`. If marks may be missing, it must not be used: the
            capture is repeated inside of :class:`Marking`.
    """
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = (node for part in parts for node in part.graph.nodes if is_region(node))
    return any(
        getattr(_example(each), "requires_grad", False)
        for node in nodes
        if node.kwargs.get("use_reentrant")
        for each in node.all_input_nodes
    )


def _resolve(part: fx.GraphModule, given: Iterable[fx.Node]) -> None:
    """Resolve the marks in a graph, or in the body of a region; see `resolve_marks`.

    Args:
        part: the graph; changed.
        given: its placeholders whose values require a gradient when it runs.
    """
    # (TorchDynamo's own flags take it that every region gives gradients; a tensor that an operation
    # changes in place has one example in all nodes)
    known = set(map(_key, given))
    for node in [*part.graph.nodes]:
        inputs = [each for each in node.all_input_nodes if _key(each) in known]
        if node.target is _mark:
            (marked,) = node.all_input_nodes
            known.add(_key(marked))
            node.replace_all_uses_with(marked)
            part.graph.erase_node(node)
        elif is_region(node):
            if any(not isinstance(_example(each), nn.Parameter) for each in inputs):
                node.update_kwarg("use_reentrant", False)
            body, *arguments = node.args
            inner: Any = part.get_submodule(str(cast(fx.Node, body).target))
            places = inner.graph.find_nodes(op="placeholder")
            _resolve(inner, [place for place, each in zip(places, arguments) if each in inputs])
            if not node.kwargs.get("use_reentrant"):
                known.add(_key(node))
        elif inputs and getattr(_example(node), "requires_grad", True):
            known.add(_key(node))
            if node.target is operator.setitem:
                known.add(_key(cast(fx.Node, node.args[0])))


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _key(node: fx.Node) -> int:
    example = _example(node)
    return id(example) if isinstance(example, Tensor) else id(node)
