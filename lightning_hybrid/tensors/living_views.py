"""Tensors that show the memory of others: taken before those became another rank's, and used later.

``data``, ``detach()``, slices, the values of a state dict: Python knows of all its objects, so they
are found wherever the user's code keeps them.
"""

import gc
from collections.abc import Iterable, Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.autograd import is_wrapped
from lightning_hybrid._torch.tensors import as_they_are, is_shared, storage_key
from lightning_hybrid.tensors.deferred import is_deferred

View = tuple[Tensor, Tensor]
"""A view, and whose memory it shows."""


def views_of(network: nn.Module) -> list[View]:
    """What code has taken of the parameters and buffers of a network."""
    tensors = (*network.parameters(), *network.buffers())
    with as_they_are():
        return living_views(tensor for tensor in tensors if not is_deferred(tensor))


def living_views(tensors: Iterable[Tensor]) -> list[View]:
    """What shows the memory of tensors.

    What is part of a graph of autograd is left out: it belongs to a step that has begun.

    Args:
        tensors: strided ones are looked at.

    Returns:
        Each view, with the first of the tensors whose memory it shows.
    """
    owners: dict[int, Tensor] = {}
    for tensor in filter(_is_strided, tensors):
        if is_shared(tensor):
            owners.setdefault(storage_key(tensor.untyped_storage()), tensor)
    if not owners:  # as nearly always: to look at all objects takes a tenth of a second
        return []
    # (other objects may compute what they give as ``__class__``)
    living = (candidate for candidate in gc.get_objects() if type(candidate) is Tensor)
    plain = (t for t in living if not t.requires_grad and _is_strided(t))
    pairs = ((t, owners.get(storage_key(t.untyped_storage()))) for t in plain)
    return [(view, owner) for view, owner in pairs if owner is not None]


def in_one_memory(tensors: Mapping[str, Tensor], wanted: Iterable[str]) -> tuple[str, str] | None:
    """A wanted tensor and another one in its memory, one of them a parameter, if there are any.

    Args:
        tensors: by name; one object may have several.
        wanted: names among them.
    """
    by_memory: dict[int, dict[int, str]] = {}
    for name, tensor in tensors.items():
        if _is_strided(tensor) and tensor.numel():
            others = by_memory.setdefault(storage_key(tensor.untyped_storage()), {})
            others.setdefault(id(tensor), name)
    names = set(wanted)
    for others in by_memory.values():
        for one, other in combinations(others.values(), 2):
            pair = tensors[one], tensors[other]
            learned = any(isinstance(tensor, nn.Parameter) for tensor in pair)
            if learned and (one in names or other in names) and _overlap(*pair):
                return (one, other) if one in names else (other, one)
    return None


def _overlap(one: Tensor, other: Tensor) -> bool:
    (first, end), (other_first, other_end) = _extent(one), _extent(other)
    return first < other_end and other_first < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Its first byte in its storage, and that behind its last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_wrapped(tensor)
