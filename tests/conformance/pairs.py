"""Two rows in one: a LightningModule with two habits, made of a row for each.

Rows have one habit each, and what one habit leaves behind another one may find. (A look at
``optimizer.state`` lost states where weights were tied, while the row of ties and that of looks
passed.) Python's method resolution order makes a pair: the methods of the first row come before
those of the second, and call them where they call ``super()``.
"""

import inspect
import random
from collections.abc import Iterator, Sequence
from itertools import count
from types import FunctionType
from typing import Any

from suite import Row

_EITHER = ("shares", "idle", "alone", "gathered")
_ONE_OF_BOTH = ("microbatches", "cuts", "samples", "parts")


def pairs(rows: Sequence[type[Row]], seed: int) -> Iterator[type[Row]]:
    """Pairs of them without end, drawn at random, each once."""
    draw, known = random.Random(seed), set()
    for _ in count():
        first, second = draw.sample(rows, 2)
        if (first, second) not in known:
            known.add((first, second))
            made = pair(first, second)
            if made is not None:
                yield made


def pair(first: type[Row], second: type[Row]) -> type[Row] | None:
    """A row with the habits of both, or ``None`` where one would replace what the other does."""
    if issubclass(first, second) or issubclass(second, first):
        return None
    # (a reference that calls the network once per micro-batch knows of training alone)
    if any(row.refused or row.needs or row.per_microbatch for row in (first, second)):
        return None
    ours, theirs = _methods(first), _methods(second)
    if any(not _calls_super(ours[name]) for name in ours.keys() & theirs.keys()):
        return None
    settings = _settings(first, second)
    if settings is None:
        return None
    return type(f"{first.__name__}_{second.__name__}", (first, second), settings)


def _methods(row: type[Row]) -> dict[str, Any]:
    """Those that make the row another than :class:`Row`."""
    found: dict[str, Any] = {}
    for kind in row.__mro__[: row.__mro__.index(Row)]:
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType | property | classmethod | staticmethod):
                found.setdefault(name, value)
    return found


def _calls_super(method: Any) -> bool:
    return isinstance(method, FunctionType) and "super()" in inspect.getsource(method)


def _settings(first: type[Row], second: type[Row]) -> dict[str, Any] | None:
    """The attributes of a pair, or ``None`` where the two contradict each other."""
    found: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"{first.__doc__} And: {second.__doc__}",
        "shapes": tuple(shape for shape in first.shapes if shape in second.shapes),
        "trains": first.trains and second.trains,
        "control": first.control and second.control,
        "tolerance": max(first.tolerance, second.tolerance),
        "equal_or_refused": first.equal_or_refused or second.equal_or_refused,
        "captures": None,
    }
    for name in _EITHER:
        found[name] = getattr(first, name) or getattr(second, name)
    for name in ("options", "arguments"):
        ours, theirs = getattr(first, name), getattr(second, name)
        if any(ours[key] != theirs[key] for key in ours.keys() & theirs.keys()):
            return None
        found[name] = {**theirs, **ours}
    for name in _ONE_OF_BOTH:
        values = [getattr(row, name) for row in (first, second)]
        special = [value for value in values if value != getattr(Row, name)]
        if len(special) == 2 and special[0] != special[1]:
            return None
        found[name] = special[0] if special else values[0]
    return found
