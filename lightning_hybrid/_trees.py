"""Values with tensors inside (tuples, lists, dicts, dataclasses): take them out, put others in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PathStep = tuple[str, Any]
"""One step from a value to a part of it: ``("item", key)`` or ``("attr", name)``."""


class Token:
    """Base class of placeholders, such as one for a tensor.

    `children` and `rebuild` treat them as leaves, even where the subclass is a dataclass.
    """


def is_dataclass_value(value: Any) -> bool:
    """Whether ``value`` is an instance of a dataclass; ``False`` for a class and for a `Token`."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Token)


def children(value: Any) -> Iterator[tuple[PathStep, Any]] | None:
    """Iterate over the direct parts of a container, each with the step that leads to it.

    Containers are instances of dataclasses, mappings, lists and tuples.

    Returns:
        Pairs of step and part; ``None`` if ``value`` is no container.
    """
    # dataclasses first: some output classes are dictionaries as well
    if is_dataclass_value(value):
        return ((("attr", f.name), getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return ((("item", key), part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return ((("item", index), part) for index, part in enumerate(value))
    return None


def tensors_in(
    value: Any, path: tuple[PathStep, ...] = ()
) -> Iterator[tuple[tuple[PathStep, ...], Tensor]]:
    """Yield every tensor inside nested containers, in order, with the steps that lead to it.

    Args:
        value: a container, a tensor, or anything else, in which there are no tensors.
        path: steps that have led to ``value``; all paths that are yielded begin with them.
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    for step, part in children(value) or ():
        yield from tensors_in(part, (*path, step))


def rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy nested containers, with each part that is no container replaced by ``leaf(part)``.

    The copies have the types of the containers, but a ``torch.Size`` becomes a tuple.

    Args:
        value: a container, or a part, for which ``leaf(value)`` is returned.
        leaf: called with each part that is no container, in order.
    """
    if is_dataclass_value(value):
        changed = {f.name: rebuild(getattr(value, f.name), leaf) for f in dataclasses.fields(value)}
        initial = {f.name for f in dataclasses.fields(value) if f.init}
        copy = dataclasses.replace(value, **{k: v for k, v in changed.items() if k in initial})
        for name in changed.keys() - initial:
            object.__setattr__(copy, name, changed[name])
        return copy
    if isinstance(value, Mapping):
        items = {key: rebuild(part, leaf) for key, part in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple):
        parts = [rebuild(part, leaf) for part in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        # a torch.Size holds numbers only; what torch.max returns is a tuple class of its own
        return tuple(parts) if isinstance(value, torch.Size) else type(value)(parts)
    if isinstance(value, list):
        return [rebuild(part, leaf) for part in value]
    return leaf(value)
