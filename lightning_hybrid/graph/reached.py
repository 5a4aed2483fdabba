"""Which nodes of a graph can be reached from others, for nodes of any kind."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def reached(start: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All nodes that can be reached from the nodes ``start``, which are among them.

    Args:
        start: where to begin.
        following: gives the nodes that are one step from a node.
    """
    found = set(start)
    waiting = list(found)  # not by recursion: networks are deep
    while waiting:
        new = set(following(waiting.pop())) - found
        found |= new
        waiting += new
    return found
