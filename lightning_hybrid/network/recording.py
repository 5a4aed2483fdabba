"""What one run of a network wrote down, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_hybrid.network.structure import Step, Token


@dataclass(frozen=True)
class Ref(Token):
    """A tensor in a recording: an input, a part of what a call returned, or an attribute."""

    kind: str
    """``input``, ``call`` or ``attribute``"""
    source: int | str
    """number of the input or of the call, or dotted name of the attribute"""
    path: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Shape:
    """What is known of one tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    """tensors with the same number share memory"""


@dataclass(frozen=True)
class Mark:
    """A module that is not a layer itself was entered or left."""

    scope: tuple[str, ...]
    entered: bool


@dataclass(frozen=True)
class Call:
    """One layer: what was called, with what, and which tensors came back."""

    scope: tuple[str, ...]
    """dotted names of the modules whose code was running, outermost first"""
    op: str
    """``call_module`` or ``call_function``"""
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returned: dict[tuple[Step, ...], Shape] = field(hash=False)
    mutated: frozenset[int] = frozenset()
    """storages changed in place"""
    mutated_names: frozenset[str] = frozenset()
    """parameters and buffers changed in place"""
    flops: int = 0
    """of convolutions and matrix products"""


@dataclass
class Recording:
    """All that one run wrote down."""

    events: list[Mark | Call]
    inputs: list[Shape]
    output: Any
    """the network's return value with a `Ref` for each tensor"""
