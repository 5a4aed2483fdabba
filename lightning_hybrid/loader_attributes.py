"""What a data set, its transforms and its sampler hold, which a batch that comes early has read.

On one device a batch is loaded after the step before it is over. One that is loaded earlier has not
seen what that step, or a hook behind it, has changed: a curriculum, a replay buffer. Attributes can
be looked at; what a file or a closure holds cannot. Only built-in types are looked into, by their
own methods: those of the user's classes may do anything.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, get_args
from zlib import crc32

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid._lightning import Trainer
from lightning_hybrid._torch.tensors import version as version_of
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.random_draws import Generator

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_GENERATORS = get_args(Generator)
_COLLECTIONS = (list, tuple, deque, set, frozenset, dict)
_NEVER = (type, ModuleType, FunctionType, MethodType, Trainer, nn.Module, Tensor, np.ndarray)
_DEPTH, _FEW, _OBJECTS = 6, 32, 1000
"""How deep, into collections of how many entries, and into how many objects is looked."""
_ENTRIES, _BYTES = 10_000, 2**20
"""Of larger collections and arrays a change in place is not seen."""


class LoaderAttributes:
    """Those of a loader, as far as they are read in this process.

    Args:
        loader: the user's.
    """

    def __init__(self, loader: Any) -> None:
        self._roots: dict[str, Any] = {"": loader}
        self._without: tuple[Any, ...] = ()
        if getattr(loader, "num_workers", 0):
            # loader processes have copies of the dataset, which hear of no change on one device
            # either; the samplers are in this process
            names = ("sampler", "batch_sampler")
            self._roots = {name: getattr(loader, name, None) for name in names}
            self._without = (getattr(loader, "dataset", None),)
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
        changed = [n for n in now if n in self._last and now[n] != self._last[n]]
        if changed:
            name = max(changed, key=lambda name: name.count("."))  # and not what holds it
            raise NetworkError(
                f"This schedule begins with later batches early, and {name} of the train loader "
                "was changed (by training_step, a hook, a validation, a thread) after such a batch "
                "was loaded, which on one device would have been loaded after the change. Change "
                "it between epochs, or use schedule='gpipe'."
            )

    def _now(self) -> dict[str, Any]:
        found = attributes(self._roots, self._without)
        return {name: _state_of(value) for name, value in found}


def plain_attributes(owner: object) -> dict[str, Any]:
    """Numbers, words and flags that an object has."""
    return {name: v for name, v in vars(owner).items() if issubclass(type(v), _PLAIN)}


def own_generators(roots: Mapping[str, object]) -> dict[str, Generator]:
    """Generators that are attributes of some objects, of what these hold, and of all modules."""
    found: dict[str, Generator] = {}
    for name, root in roots.items():
        kept = [*attributes({name: root})]
        if isinstance(root, nn.Module):  # networks are not looked into else
            parts = ((path, part) for path, part in root.named_modules(prefix=name))
            kept += [(f"{path}.{k}", v) for path, part in parts for k, v in vars(part).items()]
        found |= {path: value for path, value in kept if isinstance(value, _GENERATORS)}
    return found


def attributes(
    roots: Mapping[str, object], without: Sequence[object] = ()
) -> Iterator[tuple[str, object]]:
    """Attributes of some objects and of those that they hold, by name, without running code.

    Args:
        roots: the objects, by the names that come before those of their attributes.
        without: objects that are not looked into.
    """
    known = {id(each) for each in without}
    waiting = deque((name, value, 0) for name, value in roots.items())
    while waiting and len(known) < _OBJECTS:
        name, value, depth = waiting.popleft()
        if id(value) in known:
            continue
        known.add(id(value))
        for part, inner in _parts(value):
            path = f"{name}.{part}" if name else part
            yield path, inner
            if depth < _DEPTH and not issubclass(type(inner), (*_PLAIN, *_NEVER, *_GENERATORS)):
                waiting.append((path, inner, depth + 1))


def _parts(value: Any) -> list[tuple[str, object]]:
    kind = type(value)
    if issubclass(kind, _COLLECTIONS):
        if _length(value) > _FEW:
            return []
        pairs = dict.items(value) if issubclass(kind, dict) else enumerate(_entries(value))
        return [(str(key), inner) for key, inner in pairs if isinstance(key, _PLAIN)]
    try:
        found = object.__getattribute__(value, "__dict__").items()
    except Exception:  # a class that has no such attributes, or makes them itself
        return []
    if issubclass(kind, DataLoader):  # its other attributes are of its own iteration
        return [(name, inner) for name, inner in found if not name.startswith("_")]
    return [*found]


def _length(collection: Any) -> int:
    """Not by a method of the user's."""
    return next(kind for kind in _COLLECTIONS if isinstance(collection, kind)).__len__(collection)


def _entries(collection: Any) -> Iterator[Any]:
    return next(kind for kind in _COLLECTIONS if isinstance(collection, kind)).__iter__(collection)


def _state_of(value: Any) -> Any:
    """What changes with a value; it can be compared."""
    kind = type(value)
    if issubclass(kind, _PLAIN):
        return kind, str(value)  # NaN is itself
    if issubclass(kind, Tensor):
        return id(value), version_of(value)
    if issubclass(kind, np.ndarray) and value.nbytes <= _BYTES and not value.dtype.hasobject:
        return id(value), crc32(value.tobytes())
    if issubclass(kind, _COLLECTIONS):
        return id(value), _length(value), _contents(value)
    return id(value)


def _contents(collection: Any) -> tuple[Any, ...]:
    """Plain entries as they are, of others which they are; nothing if they are too many."""
    if _length(collection) > _ENTRIES:
        return ()
    entries = _entries(collection)
    if isinstance(collection, dict):
        entries = (each for pair in dict.items(collection) for each in pair)
    return tuple([each if type(each) in _PLAIN else id(each) for each in entries])
