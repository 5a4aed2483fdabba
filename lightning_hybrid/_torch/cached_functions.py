"""Functions whose results are kept (`functools.cache`): TorchDynamo runs them at each call again.

That makes no difference where the result follows from the arguments alone. Where such a function
draws random numbers, changes something or reads weights, its one call gives another result than
many, so the capture ends there and plain Python calls it, with its cache.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import is_lru_cache_wrapped_function
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch.fx import Node

from lightning_hybrid._torch.containers import refuse_to_follow

_CHANGES = ("mutation", "store_attr", "store_global")


def _call(own: Any, self: Any, tx: Any, *arguments: Any) -> Any:
    """Look at what the function has added to the graph, and what it has changed."""
    if not is_lru_cache_wrapped_function(self.wrapper_obj):
        return own(self, tx, *arguments)
    graph, changed = tx.output.graph, list[Any]()
    known = set(graph.nodes)
    with _changes(tx.output.side_effects, changed.append), warnings.catch_warnings():
        # of what is looked at here
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        try:
            value = own(self, tx, *arguments)
        except Unsupported:
            _leave_to_python(self.wrapper_obj)
            raise
    added = [node for node in graph.nodes if node not in known]
    reason = None
    if any(map(_draws, added)):
        reason = "draws random numbers"
    elif any(_reads_weights(node) for node in added):
        reason = "reads weights"
    elif changed:
        reason = "changes something"
    if reason is not None:
        _leave_to_python(self.wrapper_obj)
        name = getattr(self.wrapper_obj, "__qualname__", "a function")
        refuse_to_follow(
            f"functools.cache of {name}",
            f"`{name}` keeps its results (functools.cache) and {reason}, which a capture would do "
            "at every call. What is made once belongs into `__init__`, as a buffer.",
        )
    return value


def _leave_to_python(function: Any) -> None:
    """Else it would become a graph of its own, where its caller's ends."""
    code = getattr(function.__wrapped__, "__code__", None)
    if code is not None:
        skip_code(code)


@contextmanager
def _changes(effects: Any, hear: Callable[[Any], None]) -> Iterator[None]:
    """Inside, ``hear`` is called with what was there before and is changed."""

    def heard(name: str) -> Callable[..., Any]:
        own = getattr(effects, name)

        def change(item: Any, *arguments: Any, **keywords: Any) -> Any:
            if not isinstance(item.mutation_type, AttributeMutationNew | ValueMutationNew):
                hear(item)
            return own(item, *arguments, **keywords)

        return change

    before = {name: vars(effects).get(name) for name in _CHANGES}
    vars(effects).update({name: heard(name) for name in _CHANGES})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del vars(effects)[name]
            else:
                vars(effects)[name] = value


def _draws(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    operator = getattr(torch.ops.aten, name, None) if node.op.startswith("call") else None
    if operator is None:
        return False
    return any(
        torch.Tag.nondeterministic_seeded in getattr(operator, overload).tags
        for overload in operator.overloads()
    )


def _reads_weights(node: Node) -> bool:
    return any(isinstance(n.meta.get("example_value"), nn.Parameter) for n in node.all_input_nodes)


CACHED_FUNCTIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (WrapperUserFunctionVariable, "call_function", _call),
)
"""What takes the place of methods of TorchDynamo; see `exchanged_methods`."""
