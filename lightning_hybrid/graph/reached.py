"""What lies behind something in a graph, of nodes of any kind."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def reached(start: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All nodes that can be reached from some, and these.

    Args:
        start: these.
        following: the nodes behind one, a step further.
    """
    found = set(start)
    waiting = list(found)  # not by recursion: networks are deep
    while waiting:
        new = set(following(waiting.pop())) - found
        found |= new
        waiting += new
    return found
