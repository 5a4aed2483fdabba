"""Tensors that show the memory of others: taken before those became another rank's, and used later.

``data``, ``detach()``, slices, the values of a state dict: Python knows of all its objects, so they
are found wherever the user's code keeps them.
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
        Each view, with the first of the tensors that it is a part of; one that is larger, with each
        of those whose memory it shows.
    """
    # A look at all objects is the only way. A tensor tells how many others show its memory, not
    # which; a write through `data` leaves no trace in its version counter; and a read of an old
    # view leaves none at all, but would give numbers that no rank has any more.
    owners: dict[int, list[Tensor]] = {}
    for tensor in filter(_is_strided, tensors):
        if is_shared(tensor):
            owners.setdefault(storage_key(tensor.untyped_storage()), []).append(tensor)
    if not owners:  # as nearly always: to look at all objects takes a tenth of a second
        return []
    # (other objects may compute what they give as ``__class__``)
    living = (candidate for candidate in gc.get_objects() if type(candidate) is Tensor)
    plain = (t for t in living if not t.requires_grad and _is_strided(t))
    pairs = ((t, owners.get(storage_key(t.untyped_storage()), ())) for t in plain)
    return [(view, owner) for view, those in pairs for owner in _shown(view, those)]


def _shown(view: Tensor, owners: Sequence[Tensor]) -> list[Tensor]:
    whole = [owner for owner in owners if _lies_in(view, owner)]
    return whole[:1] or [owner for owner in owners if _overlap(view, owner)]


def _lies_in(view: Tensor, owner: Tensor) -> bool:
    """Whether all that a tensor shows is memory of another one, in the same storage."""
    (first, end), (owner_first, owner_end) = _extent(view), _extent(owner)
    return owner_first <= first and end <= owner_end


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


def refuse_one_memory(module: nn.Module, names: Iterable[str]) -> None:
    """Two tensors in one memory, of which another rank is to own one.

    Args:
        module: the LightningModule.
        names: of what other ranks are to own.

    Raises:
        NetworkError: one of them shares its memory with another parameter.
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
    """What shows the memory of a tensor that another rank is to own, and more.

    Raises:
        NetworkError: it does.
    """
    if not _lies_in(view, owner):
        raise NetworkError(
            f"A tensor of shape {tuple(view.shape)} shows the memory of {name!r} and more (as "
            "after `parameter.data = flat[:n].view(...)`), and another rank is to own that "
            "parameter: a change there would not be seen in the larger tensor, nor a change of "
            "that there. Give the parameter its own memory (`parameter.data = part.clone()`)."
        )


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
