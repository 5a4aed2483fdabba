"""What a data set, its transforms and its sampler hold, which a batch that comes early has read.

On one device a batch is loaded after the step before it is over. One that is loaded earlier has not
seen what that step, or a hook behind it, has changed: a curriculum, a replay buffer. Attributes can
be looked at; what a file or a closure holds cannot.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid._lightning import Trainer
from lightning_hybrid._torch.tensors import version as version_of
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.random_draws import Generator

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_COLLECTIONS = (list, tuple, deque, set, frozenset, dict)
_NEVER = (type, ModuleType, FunctionType, MethodType, Trainer, nn.Module, Tensor, np.ndarray)
_DEPTH, _FEW, _OBJECTS = 4, 32, 1000


class LoaderAttributes:
    """Those of a loader whose batches are made in this process.

    Args:
        loader: the user's.
    """

    def __init__(self, loader: Any) -> None:
        # (loader processes have copies, which hear of no change on one device either)
        self._loader = None if getattr(loader, "num_workers", 0) else loader
        self._last: dict[str, Any] = {}

    def look(self) -> None:
        """A batch was loaded: these are the attributes that it has read."""
        self._last = self._now()

    def check(self) -> None:
        """A batch that was loaded before has its turn, or the next one is to be loaded.

        Raises:
            NetworkError: something else than the loader has changed an attribute.
        """
        now = self._now()
        for name in now.keys() & self._last.keys():
            if now[name] != self._last[name]:
                raise NetworkError(
                    f"This schedule begins with later batches early, and {name} of the train "
                    "loader was changed (by training_step or a hook) after such a batch was "
                    "loaded, which on one device would have been loaded after the change. Change "
                    "it between epochs, or use schedule='gpipe'."
                )

    def _now(self) -> dict[str, Any]:
        if self._loader is None:
            return {}
        return {name: _state_of(value) for name, value in attributes({"": self._loader})}


def plain_attributes(owner: object) -> dict[str, Any]:
    """Numbers, words and flags that an object has."""
    return {name: value for name, value in vars(owner).items() if isinstance(value, _PLAIN)}


def own_generators(roots: Mapping[str, object]) -> dict[str, Generator]:
    """Generators that are attributes of some objects, or of what these hold."""
    return {name: value for name, value in attributes(roots) if isinstance(value, Generator)}


def attributes(roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Attributes of some objects and of those that they hold, by name, without running code."""
    known: set[int] = set()
    waiting = deque((name, value, 0) for name, value in roots.items())
    while waiting and len(known) < _OBJECTS:
        name, value, depth = waiting.popleft()
        if id(value) in known:
            continue
        known.add(id(value))
        for part, inner in _parts(value):
            path = f"{name}.{part}" if name else part
            yield path, inner
            if depth < _DEPTH and not isinstance(inner, (*_PLAIN, *_NEVER, Generator)):
                waiting.append((path, inner, depth + 1))


def _parts(value: Any) -> list[tuple[str, object]]:
    if isinstance(value, _COLLECTIONS):
        if len(value) > _FEW:
            return []
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [(str(key), inner) for key, inner in pairs]
    found = [*getattr(value, "__dict__", {}).items()]
    if isinstance(value, DataLoader):  # its other attributes are of its own iteration
        found = [(name, inner) for name, inner in found if not name.startswith("_")]
    return found


def _state_of(value: Any) -> Any:
    """What changes with a value; it can be compared."""
    if isinstance(value, _PLAIN):
        return type(value), str(value)  # NaN is itself
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, _COLLECTIONS):
        return id(value), len(value)
    return id(value)
