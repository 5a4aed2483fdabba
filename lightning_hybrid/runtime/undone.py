"""Put back what code of the user's has changed in objects that a copy of a module shares.

A forward hook keeps a feature in an attribute of the LightningModule, in what its closure holds or
in a global dictionary; a class counts its calls. Attributes of modules and of objects whose methods
are hooks, the containers in them, closures and globals of hooks and forwards, and attributes of the
modules' classes are put back; what those functions call elsewhere, and files, are not looked at.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.modules import tables
from lightning_hybrid._torch.tensors import as_they_are, same_numbers

_CONTAINERS = (dict, list, set, deque)
_MANY = 10_000
"""Larger containers hold data, and are not looked through."""
_VALUES = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None), Tensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "forward")


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """What the user has put on a module and its parts to be called in a forward."""
    for part in module.modules():
        for name in _HOOKS:
            held = vars(part).get(name)
            yield from held.values() if isinstance(held, dict) else () if held is None else (held,)


def owner_of(hook: Any) -> Any:
    """The object whose method a hook is; ``None``: it is none's."""
    while isinstance(hook, partial):
        hook = hook.func
    return hook.__self__ if isinstance(hook, MethodType) else None


@contextmanager
def undone(root: nn.Module, module: nn.Module) -> Iterator[None]:
    """Inside, code of the user's runs beside a call; afterwards things are as before.

    Args:
        root: the LightningModule.
        module: the network; what runs is a copy of it.
    """
    noted = _Noted()
    for part in {id(p): p for p in (*root.modules(), *module.modules())}.values():
        noted.container(vars(part))
        noted.numbers(tables(part)[1].values())
    for kind in {type(part) for part in module.modules()}:
        if not kind.__module__.startswith("torch."):
            noted.attributes_of_class(kind)
            noted.function(kind.forward)
    for hook in hooks_of(module):
        noted.function(hook)
    try:
        yield
    finally:
        noted.put_back()


class _Noted:
    """Notes values that a check of the network may change, so that they can be put back."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._places: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self._seen = set[int]()

    def container(self, value: Any) -> None:
        """Note what a container holds, and what the containers in it hold."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, _CONTAINERS) or id(one) in self._containers or len(one) > _MANY:
                continue
            self._containers[id(one)] = one, one.copy()
            waiting += one.values() if isinstance(one, dict) else one

    def numbers(self, buffers: Iterable[Any]) -> None:
        """Note the numbers of tensors that may be written to in place."""
        with as_they_are():
            self._numbers += [(b, b.detach().clone()) for b in buffers if b is not None]

    def function(self, function: Any) -> None:
        """Note what a function can change: its closure, its globals, the object of a method."""
        waiting = [function]
        while waiting:
            one = waiting.pop()
            if id(one) in self._seen:
                continue
            self._seen.add(id(one))
            if isinstance(one, partial):
                waiting += [one.func, *one.args, *one.keywords.values()]
            elif isinstance(one, MethodType):
                waiting += [one.__func__, one.__self__]
            elif isinstance(one, FunctionType):
                waiting += self._held_by(one)
            elif isinstance(one, _CONTAINERS):
                self.container(one)
            elif not isinstance(one, type | nn.Module) and hasattr(one, "__dict__"):
                self.container(vars(one))

    def attributes_of_class(self, kind: Any) -> None:
        """Note the attributes of a class that are values and containers, not code."""
        for name, value in [*vars(kind).items()]:
            if isinstance(value, (*_VALUES, *_CONTAINERS)) and not name.startswith("__"):
                self.container(value)
                self._place(partial(getattr, kind, name), partial(setattr, kind, name))

    def _held_by(self, function: FunctionType) -> Iterator[Any]:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
            if isinstance(value, _VALUES):
                self._place(
                    partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")
                )
            yield value
        names = function.__globals__
        for name in _names(function.__code__):
            value = names.get(name)
            if name in names and isinstance(value, (*_VALUES, *_CONTAINERS)):
                self.container(value)
                self._place(partial(names.get, name), partial(names.__setitem__, name))

    def _place(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._places.append((read, write, read()))

    def put_back(self) -> None:
        for read, write, value in self._places:
            if read() is not value:
                write(value)
        for container, before in self._containers.values():
            if not _is_same(container, before):
                container.clear()
                getattr(container, "extend" if isinstance(before, list | deque) else "update")(
                    before
                )
        with torch.no_grad(), as_they_are():
            for tensor, before in self._numbers:
                # (a write counts, and autograd refuses what was written to)
                same = tensor.layout is not torch.strided or same_numbers(tensor, before)
                if not same and not torch.allclose(tensor, before, 0, 0, equal_nan=True):
                    tensor.copy_(before)


def _names(code: CodeType) -> Iterator[str]:
    """Names that code and the functions in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_same(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items())
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    return all(a is b for a, b in zip(one, other))
