"""What running a network changes in it besides its output: noticed, refused, or undone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn


class Untraceable(Exception):
    """The code of a module cannot be written down layer by layer."""


def _attributes(module: nn.Module) -> dict[str, tuple[Any, list[Any] | None]]:
    """The module's attributes, each with a copy of its parts where it is a container."""
    attributes = {}
    for key, value in vars(module).items():
        parts: list[Any] | None = None
        if isinstance(value, dict):
            parts = list(value.items())
        elif isinstance(value, list | set):
            parts = list(value)
        attributes[key] = (value, parts)
    return attributes


def _differs(old: tuple[Any, list[Any] | None], new: tuple[Any, list[Any] | None]) -> bool:
    if old[0] is not new[0] or (old[1] is None) != (new[1] is None):
        return True
    if old[1] is None or new[1] is None:
        return False

    def parts(items: list[Any]) -> list[int]:
        return [id(part[1]) if isinstance(part, tuple) else id(part) for part in items]

    return parts(old[1]) != parts(new[1])


@contextlib.contextmanager
def side_effects_refused(module: nn.Module) -> Iterator[None]:
    """Undo what the block changes in the module's own attributes, and say that it did so.

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
        changed = sorted(
            key
            for key in before.keys() | after.keys()
            if key not in before or key not in after or _differs(before[key], after[key])
        )
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


def _put_back(module: nn.Module, before: dict[str, tuple[Any, list[Any] | None]]) -> None:
    attributes = vars(module)
    for key in attributes.keys() - before.keys():
        del attributes[key]
    for key, (value, parts) in before.items():
        attributes[key] = value
        if parts is None:
            continue
        if _differs((value, parts), _attributes_of(value)):
            value.clear()
            value.extend(parts) if isinstance(value, list) else value.update(parts)


def _attributes_of(value: Any) -> tuple[Any, list[Any]]:
    return value, list(value.items()) if isinstance(value, dict) else list(value)


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Undo every change of attributes, and every draw from Python's and NumPy's generators."""
    before = [(part, _attributes(part)) for part in module.modules()]
    generators = random.getstate(), numpy.random.get_state(legacy=False)
    try:
        yield
    finally:
        for part, attributes in before:
            _put_back(part, attributes)
        _put_generators_back(generators)


@contextlib.contextmanager
def untouched(network: nn.Module) -> Iterator[None]:
    """Undo what the block does to the network's buffers, modes and attributes, and to generators.

    Gradients are the caller's care. Hooks that the user registered on inner modules do run.
    """
    flags = [(module, module.training) for module in network.modules()]
    buffers = [(value, value.detach().clone()) for value in network.buffers()]
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
