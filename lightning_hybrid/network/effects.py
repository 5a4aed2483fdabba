"""What running a network changes in it besides its output: noticed, refused, or undone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn


class Untraceable(Exception):
    """The code of a module cannot be written down layer by layer."""


_Attribute = tuple[Any, list[Any] | None]
"""A value, with a copy of its parts where it is a container."""


def _attributes(module: nn.Module) -> dict[str, _Attribute]:
    return {
        key: (value, _parts(value) if isinstance(value, dict | list | set) else None)
        for key, value in vars(module).items()
    }


def _changed(before: dict[str, _Attribute], after: dict[str, _Attribute]) -> list[str]:
    """Names of the attributes that were set, removed or filled."""
    return sorted(
        key
        for key in before.keys() | after.keys()
        if key not in before or key not in after or _differs(before[key], after[key])
    )


def _differs(old: _Attribute, new: _Attribute) -> bool:
    if old[0] is not new[0] or (old[1] is None) != (new[1] is None):
        return True
    if old[1] is None or new[1] is None:
        return False

    def parts(items: list[Any]) -> list[int]:
        return [id(part[1]) if isinstance(part, tuple) else id(part) for part in items]

    return parts(old[1]) != parts(new[1])


class Blackboards:
    """Lists and dictionaries that several modules of a network hold, to hand tensors to each other.

    One module writes a tensor into a place, another one reads it in the same call (the heads of
    deep supervision). In a recording that is an ordinary edge of the graph, and the write itself
    need not be kept: who reads before somebody has written finds a tensor that the recording does
    not know, and cannot be traced. What a module that is one layer holds is no blackboard: nobody
    sees what it does there.

    Args:
        network: the network.
        layers: dotted names of its modules that are one layer each.
    """

    def __init__(self, network: nn.Module, layers: Iterable[str]) -> None:
        holders: dict[int, int] = {}
        boards: dict[int, list[Any] | dict[Any, Any]] = {}
        for module in network.modules():
            for key, value in vars(module).items():
                if isinstance(value, list | dict) and key not in _TABLES:
                    holders[id(value)] = holders.get(id(value), 0) + 1
                    boards[id(value)] = value
        inside = {id(part) for name in layers for part in state_of(network.get_submodule(name))}
        self._boards = {
            number: board
            for number, board in boards.items()
            if holders[number] > 1 and number not in inside
        }

    def takes(self, old: _Attribute, new: _Attribute) -> bool:
        """Whether a change of an attribute is a tensor written over another one on a board."""
        if id(old[0]) not in self._boards or old[0] is not new[0]:
            return False
        before, after = (dict(_by_place(attribute)) for attribute in (old, new))
        return before.keys() == after.keys() and all(
            one is after[place] or (isinstance(one, Tensor) and isinstance(after[place], Tensor))
            for place, one in before.items()
        )

    @contextlib.contextmanager
    def wiped_on_error(self) -> Iterator[None]:
        """If the block fails, what it wrote is gone."""
        before = [(board, _parts(board)) for board in self._boards.values()]
        try:
            yield
        except BaseException:
            for board, parts in before:
                _refill(board, parts)
            raise


def _by_place(attribute: _Attribute) -> Iterable[tuple[Any, Any]]:
    value, parts = attribute
    return parts or () if isinstance(value, dict) else enumerate(parts or ())


_TABLES = frozenset(vars(nn.Module()))
"""Attributes that every module has, such as ``_parameters``."""


def state_of(module: nn.Module) -> Iterator[Any]:
    """The objects whose change is remembered: the modules inside, and their lists and the like."""
    for part in module.modules():
        yield part
        yield from (
            value
            for key, value in vars(part).items()
            if isinstance(value, dict | list | set) and key not in _TABLES
        )


@contextlib.contextmanager
def side_effects_refused(module: nn.Module, boards: Blackboards) -> Iterator[None]:
    """Undo what the block changes in the module's own attributes, and say that it did so.

    What it writes on a blackboard stays there for the modules that read it.

    Raises:
        Untraceable: the block set an attribute or drew from Python's or NumPy's generator; a
            recording would lose the first and freeze the second.
    """
    before = _attributes(module)
    generators = random.getstate(), numpy.random.get_state(legacy=False)
    drawn = False
    try:
        yield
    finally:
        after = _attributes(module)
        for key in before.keys() & after.keys():
            if boards.takes(before[key], after[key]):
                before[key] = after[key]
        changed = _changed(before, after)
        _put_back(module, before)
        drawn = _put_generators_back(generators)
    if changed:
        raise Untraceable(f"its forward sets or changes the attribute {changed[0]!r}")
    if drawn:
        raise Untraceable("its forward draws from Python's or NumPy's random generator")


def _put_generators_back(states: tuple[Any, Any]) -> bool:
    """Give Python's and NumPy's generators these states; whether they had others."""
    python, numpys = states
    now = numpy.random.get_state(legacy=False)
    drawn = random.getstate() != python or any(
        not numpy.array_equal(now["state"][key], value) for key, value in numpys["state"].items()
    )
    if drawn:
        random.setstate(python)
        numpy.random.set_state(numpys)
    return bool(drawn)


def _put_back(module: nn.Module, before: dict[str, _Attribute]) -> None:
    attributes = vars(module)
    for key in attributes.keys() - before.keys():
        del attributes[key]
    for key, (value, parts) in before.items():
        attributes[key] = value
        if parts is not None:
            _refill(value, parts)


def _parts(value: Any) -> list[Any]:
    return list(value.items()) if isinstance(value, dict) else list(value)


def _refill(value: Any, parts: list[Any]) -> None:
    """Give a container the parts that it had."""
    if _differs((value, parts), (value, _parts(value))):
        value.clear()
        value.extend(parts) if isinstance(value, list) else value.update(parts)


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Undo every change of attributes, and every draw from Python's and NumPy's generators.

    Yields:
        Filled at the end with what was changed, by identity: modules, and containers in them.
    """
    before = [(part, _attributes(part)) for part in module.modules()]
    generators = random.getstate(), numpy.random.get_state(legacy=False)
    changed: dict[int, Any] = {}
    try:
        yield changed
    finally:
        for part, attributes in before:
            for key in _changed(attributes, _attributes(part)):
                old = attributes.get(key, (None, None))
                container = old[1] is not None and vars(part).get(key) is old[0]
                thing = old[0] if container else part
                changed[id(thing)] = thing
            _put_back(part, attributes)
        _put_generators_back(generators)


@contextlib.contextmanager
def untouched(network: nn.Module) -> Iterator[None]:
    """Undo what the block does to the network's buffers, modes and attributes, and to generators.

    Parameters that are not trained count as buffers: codebooks are written into such. Gradients are
    the caller's care. Hooks that the user registered on inner modules do run.
    """
    flags = [(module, module.training) for module in network.modules()]
    frozen = (value for value in network.parameters() if not value.requires_grad)
    buffers = [(value, value.detach().clone()) for value in (*network.buffers(), *frozen)]
    with torch.random.fork_rng(devices=_cuda_devices(network)), unchanged(network):
        try:
            yield
        finally:
            for module, flag in flags:
                module.training = flag
            _restore(buffers)


def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for value, copy in buffers:
            # an unchanged buffer may be waiting in somebody's graph, where a write would show
            if not torch.equal(value, copy):
                value.copy_(copy)


def _cuda_devices(network: nn.Module) -> list[int]:
    tensors = [*network.parameters(), *network.buffers()]
    return sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
