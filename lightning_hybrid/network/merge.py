"""Compare recordings of one network and find what depends on the batch size and on the mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from lightning_hybrid.network.recording import Call, Mark, Recording, Ref, Shape
from lightning_hybrid.network.structure import Step, Token


@dataclass(frozen=True)
class Setting:
    """What a recording was made with."""

    batch: int
    training: bool


@dataclass(frozen=True)
class Size(Token):
    """A whole number that depends on the batch size B: ``slope * B + offset``."""

    slope: Fraction
    offset: Fraction

    def at(self, batch: int) -> Fraction:
        """The number for a batch size."""
        return self.slope * batch + self.offset


@dataclass(frozen=True)
class ByMode(Token):
    """A constant that is one thing while a module trains and another while it does not."""

    module: str
    training: Any
    evaluation: Any


class Device(Token):
    """Stands for the device that the network runs on."""


class Mismatch(Exception):
    """The recordings differ in more than numbers.

    Args:
        scope: dotted names of the modules whose code differs, outermost first.
        reason: what differs.
        by_mode: whether it is training and evaluation that differ, and not the batch sizes.
    """

    def __init__(self, scope: tuple[str, ...], reason: str, by_mode: bool) -> None:
        super().__init__(reason)
        self.scope = scope
        self.reason = reason
        self.by_mode = by_mode


@dataclass(frozen=True)
class Value:
    """A tensor of the traced network."""

    size: tuple[int, ...]
    """at the traced batch size"""
    dtype: torch.dtype
    batch_dim: tuple[int, Fraction] | None
    """a dimension whose size is a multiple of the batch's, and that multiple"""
    storages: tuple[int, ...]
    """per recording, equal numbers share memory"""

    @property
    def bytes(self) -> int:
        """Size in memory at the traced batch size."""
        return torch.Size(self.size).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class MergedCall:
    """A `Call` with `Size`, `ByMode` and `Device` in the place of what varies."""

    scope: tuple[str, ...]
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returned: dict[tuple[Step, ...], Value]
    mutated: tuple[frozenset[int], ...]
    mutated_names: frozenset[str]
    flops: int


class Merger:
    """Merges recordings made with ``settings`` on a network that seemed to be on ``device``.

    The first two settings with the same mode and different batch sizes give the dependence on the
    batch size, the rest must agree with it.
    """

    def __init__(self, settings: Sequence[Setting], device: torch.device) -> None:
        self.settings = settings
        self.device = device
        last = settings[-1].training
        self._first, self._second = [i for i, s in enumerate(settings) if s.training == last][:2]

    def calls(self, recordings: Sequence[Recording]) -> list[MergedCall]:
        """The calls of all recordings as one list.

        Raises:
            Mismatch: the recordings differ in what is called.
        """
        merged = []
        for events in zip(*(r.events for r in recordings), strict=False):
            if not all(_same_step(events[0], event) for event in events):
                raise self._mismatch(events, "calls other layers")
            if isinstance(events[0], Call):
                merged.append(self._call(events))
        if len({len(r.events) for r in recordings}) > 1:
            lengths = [len(r.events) for r in recordings]
            raise Mismatch((), "calls more layers", self._by_mode(lengths))
        return merged

    def output(self, recordings: Sequence[Recording]) -> Any:
        """What the network returns, with a `Ref` for each tensor."""
        outputs = [r.output for r in recordings]
        for output in outputs:
            if output != outputs[0]:
                by_mode = self._by_mode([str(o) for o in outputs])
                raise Mismatch((), "returns something else", by_mode)
        return outputs[0]

    def value(self, shapes: Sequence[Shape]) -> Value:
        """What the recordings say of one tensor."""
        first, second = shapes[self._first], shapes[self._second]
        batches = self.settings[self._first].batch, self.settings[self._second].batch
        batch_dim = None
        for dim, (a, b) in enumerate(zip(first.size, second.size)):
            slope = Fraction(b - a, batches[1] - batches[0])
            if slope > 0 and slope * batches[0] == a:
                batch_dim = dim, slope
                break
        storages = tuple(shape.storage for shape in shapes)
        return Value(first.size, first.dtype, batch_dim, storages)

    def _call(self, calls: Sequence[Call]) -> MergedCall:
        first = calls[0]
        try:
            args = self._merge([call.args for call in calls], first.scope)
            kwargs = self._merge([call.kwargs for call in calls], first.scope)
        except Mismatch as mismatch:
            raise Mismatch(first.scope, mismatch.reason, mismatch.by_mode) from None
        returned = {
            path: self.value([call.returned[path] for call in calls]) for path in first.returned
        }
        return MergedCall(
            first.scope, first.op, first.target, args, kwargs, returned,
            tuple(call.mutated for call in calls),
            frozenset().union(*(call.mutated_names for call in calls)),
            max(call.flops for call in calls),
        )  # fmt: skip

    def _merge(self, values: Sequence[Any], scope: tuple[str, ...]) -> Any:
        first = values[0]
        kinds = {type(value) for value in values}
        if len(kinds) == 1 and isinstance(first, tuple | list):
            if len({len(value) for value in values}) == 1:
                return (
                    [self._merge(parts, scope) for parts in zip(*values)]
                    if isinstance(first, list)
                    else tuple(self._merge(parts, scope) for parts in zip(*values))
                )
        elif len(kinds) == 1 and isinstance(first, dict):
            if len({tuple(value) for value in values}) == 1:
                return {key: self._merge([v[key] for v in values], scope) for key in first}
        elif len(kinds) == 1 and isinstance(first, slice):
            ends = [(v.start, v.stop, v.step) for v in values]
            return slice(*self._merge(ends, scope))
        elif isinstance(first, torch.device) and first == self.device:
            return Device()
        elif len(kinds) == 1 and all(_equal(first, value) for value in values):
            return first
        return self._varying(values, scope)

    def _varying(self, values: Sequence[Any], scope: tuple[str, ...]) -> Any:
        """A number that depends on the batch size, or a constant that depends on the mode."""
        if any(isinstance(value, Ref) for value in values):
            by_mode = self._by_mode(values)
            raise Mismatch(scope, "gives other tensors to a layer", by_mode)
        by_training = {
            mode: [v for v, s in zip(values, self.settings) if s.training is mode]
            for mode in (True, False)
        }
        if all(
            part and all(_equal(part[0], value) for value in part) for part in by_training.values()
        ):
            module = scope[-1] if scope else ""
            return ByMode(module, by_training[True][0], by_training[False][0])
        size = self._linear(values)
        if size is None:
            raise Mismatch(scope, f"computes {values[0]!r} from the batch size", by_mode=False)
        return size

    def _linear(self, values: Sequence[Any]) -> Size | None:
        if not all(type(value) is int for value in values):
            return None
        batches = self.settings[self._first].batch, self.settings[self._second].batch
        rise = values[self._second] - values[self._first]
        slope = Fraction(rise, batches[1] - batches[0])
        size = Size(slope, values[self._first] - slope * batches[0])
        agree = all(size.at(s.batch) == value for s, value in zip(self.settings, values))
        # half a sample is no size: such a number was rounded, and rounds otherwise elsewhere
        return size if agree and size.offset.denominator == 1 else None

    def _mismatch(self, events: Sequence[Mark | Call], reason: str) -> Mismatch:
        scopes = [event.scope for event in events]
        common = []
        for names in zip(*scopes):
            if len(set(names)) > 1:
                break
            common.append(names[0])
        if all(isinstance(e, Mark) and e.entered for e in events) and len(common) == len(scopes[0]):
            common.pop()
        keys = [str(_step_key(event)) for event in events]
        return Mismatch(tuple(common), reason, self._by_mode(keys))

    def _by_mode(self, values: Sequence[Any]) -> bool:
        """Whether the values agree among the recordings of the same mode."""
        return all(
            _equal(a, b)
            for a, s in zip(values, self.settings)
            for b, t in zip(values, self.settings)
            if s.training == t.training
        )


def _step_key(event: Mark | Call) -> tuple[Any, ...]:
    if isinstance(event, Mark):
        return (event.scope, event.entered)
    returned = tuple((path, shape.dtype) for path, shape in event.returned.items())
    return (event.scope, event.op, event.target, returned)


def _same_step(a: Mark | Call, b: Mark | Call) -> bool:
    return type(a) is type(b) and _step_key(a) == _step_key(b)


def _equal(a: Any, b: Any) -> bool:
    # 1 == True == 1.0, and NaN is not itself
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # an object that cannot be compared is only itself
        return False
