"""Finds tensors of the user's code that are in the memory of parameters and buffers.

Such a view (``data``, ``detach()``, a slice, a value of a state dict) may have been taken before
another rank became the owner of the tensor, and be used later. Python's garbage collector lists all
objects, so views are found wherever the user's code keeps them.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.autograd import is_wrapped
from lightning_hybrid._torch.tensors import as_they_are, is_shared, storage_key
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.remote.deferred import is_deferred

ViewInMemory = tuple[Tensor, Tensor]
"""A view, and the parameter or buffer in whose memory it is."""


def views_of(network: nn.Module) -> list[ViewInMemory]:
    """Find all views of a network's parameters and buffers among the objects of this process.

    Deferred parameters and buffers are left out.
    """
    tensors = (*network.parameters(), *network.buffers())
    with as_they_are():
        return living_views(tensor for tensor in tensors if not is_deferred(tensor))


def living_views(tensors: Iterable[Tensor]) -> list[ViewInMemory]:
    """Find all views of some tensors among the objects of this process.

    Views in autograd's graph are left out, since they belong to a step that has begun.

    Args:
        tensors: the tensors; sparse ones are left out.

    Returns:
        Pairs: each view with the first of the tensors in whose memory it lies; if it lies in none
        of them, with each tensor whose memory it overlaps.
    """
    # There is no other way than to look at all objects: a tensor tells how many others share its
    # memory, not which; and a write through `data`, or a read, leaves no trace in the version
    # counter, so that a stale view could not be noticed when it is used.
    owners: dict[int, list[Tensor]] = {}
    for tensor in filter(_is_strided, tensors):
        if is_shared(tensor):
            owners.setdefault(storage_key(tensor.untyped_storage()), []).append(tensor)
    if not owners:  # (as nearly always; looking at all objects takes a tenth of a second)
        return []
    # (`type`, not `isinstance`, which asks an object for its ``__class__`` and may run its code)
    living = (candidate for candidate in gc.get_objects() if type(candidate) is Tensor)
    plain = (t for t in living if not t.requires_grad and _is_strided(t))
    pairs = ((t, owners.get(storage_key(t.untyped_storage()), ())) for t in plain)
    return [(view, owner) for view, those in pairs for owner in _shown(view, those)]


def _shown(view: Tensor, owners: Sequence[Tensor]) -> list[Tensor]:
    """Of some tensors, return the first in whose memory a view lies; else all that it overlaps.

    Args:
        view: the view.
        owners: the tensors, in the same storage as the view.
    """
    whole = [owner for owner in owners if _lies_in(view, owner)]
    return whole[:1] or [owner for owner in owners if _overlap(view, owner)]


def _lies_in(view: Tensor, owner: Tensor) -> bool:
    """Whether a tensor is inside of the memory of another one, in the same storage."""
    (first, end), (owner_first, owner_end) = _extent(view), _extent(owner)
    return owner_first <= first and end <= owner_end


def in_one_memory(tensors: Mapping[str, Tensor], wanted: Iterable[str]) -> tuple[str, str] | None:
    """Find a wanted tensor that overlaps another one in memory, if one of them is a parameter.

    Args:
        tensors: the tensors by name; one object may have several names.
        wanted: names of some of them.

    Returns:
        The names of the wanted tensor and of the other one; ``None``: there is no such pair.
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


def refuse_one_memory(module: nn.Module, names: Iterable[str]) -> None:
    """Refuse two tensors that overlap in memory, if another rank is to own one of them.

    Two buffers may overlap.

    Args:
        module: the LightningModule.
        names: names of the tensors that other ranks are to own.

    Raises:
        NetworkError: there are two such tensors.
    """
    everything = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    with as_they_are():
        found = in_one_memory({n: t for n, t in everything if not is_deferred(t)}, names)
    if found is not None:
        one, other = found
        raise NetworkError(
            f"{one!r} and {other!r} are two tensors in one memory (as after `a.data = b.data`), "
            f"and another rank is to own {one!r}. A change of it there would not change the other "
            "here. Make them one parameter (`module.a = module.b`), which may be in several "
            "stages, or give each its own memory (`a.data = b.data.clone()`)."
        )


def refuse_larger(view: Tensor, owner: Tensor, name: str) -> None:
    """Refuse a view that is larger than the tensor that another rank is to own.

    Args:
        view: the view.
        owner: the tensor.
        name: name of the tensor.

    Raises:
        NetworkError: the view is not inside of the tensor's memory.
    """
    if not _lies_in(view, owner):
        is_parameter = isinstance(owner, nn.Parameter)
        kind = "parameter" if is_parameter else "buffer"
        last = name.rpartition(".")[2]
        own = "parameter.data = part.clone()" if is_parameter else f"m.{last} = m.{last}.clone()"
        raise NetworkError(
            f"A tensor of shape {tuple(view.shape)} shows the memory of {kind} {name!r} and more "
            "(as after `parameter.data = flat[:n].view(...)`), and another rank is to own that "
            f"{kind}: a change there would not be seen in the larger tensor, nor a change of "
            f"that there. Give the {kind} its own memory, in its module m (`{own}`)."
        )


def _overlap(one: Tensor, other: Tensor) -> bool:
    (first, end), (other_first, other_end) = _extent(one), _extent(other)
    return first < other_end and other_first < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the part of its storage that a tensor spans, in bytes.

    It is a pair: the place of the first byte, and that of the byte behind the last.
    """
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_wrapped(tensor)
