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
    """Base of what stands in a structure in the place of something else; never a container."""


def is_dataclass_value(value: Any) -> bool:
    """Whether ``value`` is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Token)


def children(value: Any) -> Iterator[tuple[PathStep, Any]] | None:
    """The parts of a container with the steps to them; None for what is no container."""
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
    """Every tensor inside ``value`` with the steps that lead to it, in order."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for step, part in children(value) or ():
        yield from tensors_in(part, (*path, step))


def rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of the containers in ``value`` with ``leaf(part)`` in the place of each other part."""
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
