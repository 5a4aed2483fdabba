"""What TorchDynamo computes wrongly of containers and generators: right here, or not captured."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import DequeVariable
from torch._dynamo.variables.misc import RandomVariable
from torch._dynamo.variables.user_defined import OrderedDictVariable


def _take_length(own: Any, self: Any, value: Any) -> Any:
    """A queue that is full gives up an element for each new one, in the captured call too."""
    taken = own(self, value)
    if isinstance(value, deque) and value.maxlen is not None:
        taken.maxlen = ConstantVariable.create(value.maxlen)
        source = AttrSource(self.source, "maxlen")
        install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
    return taken


def _write_back(own: Any, self: Any, *arguments: Any) -> Any:
    """Queues get their elements anew, of which there are no more than fit: no length is needed."""
    queues = [one for one in self._get_modified_vars() if isinstance(one, DequeVariable)]
    lengths = [queue.maxlen for queue in queues]
    for queue in queues:
        queue.maxlen = ConstantVariable.create(None)
    try:
        return own(self, *arguments)
    finally:
        for queue, length in zip(queues, lengths):
            queue.maxlen = length


def _move(own: Any, self: Any, tx: Any, name: str, *arguments: Any) -> Any:
    """The order would stay as it was, and another order not be seen."""
    if name == "move_to_end" and self.source is not None:
        refuse_to_follow(f"{OrderedDict.__name__}.move_to_end")
    return own(self, tx, name, *arguments)


def _draw(own: Any, self: Any, tx: Any, name: str, *arguments: Any) -> Any:
    """A second capture would draw from where the first one began."""
    if self.source is not None:
        refuse_to_follow(f"random.Random.{name}")
    return own(self, tx, name, *arguments)


def refuse_to_follow(what: str, why: str | None = None) -> None:
    """End the capture at this place of the user's code, as one that TorchDynamo cannot follow."""
    unimplemented(
        gb_type="Captured wrongly",
        context=what,
        explanation=why or f"`{what}` of an object that was there before the call is not followed.",
        hints=[],
    )


CONTAINERS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (VariableBuilder, "wrap_listlike", _take_length),
    (SideEffects, "codegen_update_mutated", _write_back),
    (OrderedDictVariable, "call_method", _move),
    (RandomVariable, "call_method", _draw),
)
"""What takes the place of methods of TorchDynamo; see `exchanged_methods`."""

TABLES = (VariableBuilder._type_dispatch_impl,)
"""They have methods by the types that these are for, from the first compilation in a process on."""
