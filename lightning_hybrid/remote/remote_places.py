"""The parameters and buffers of the user's module that other ranks own, and that are proxies."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.autograd import is_wrapped
from lightning_hybrid._torch.modules import tables
from lightning_hybrid._torch.tensors import as_they_are, is_shared, storage_key
from lightning_hybrid.errors import HybridError, NetworkError
from lightning_hybrid.remote.deferred import is_deferred
from lightning_hybrid.remote.hollow_network import emptied
from lightning_hybrid.remote.proxy import (
    Kind,
    Remote,
    Table,
    make_plain,
    make_proxy,
    proxies,
    source_of,
)


class RemotePlaces:
    """The parameters and buffers of a module that other ranks own, each with its place in it.

    Args:
        table: fetches and sends values for the proxies.

    Attributes:
        tensors: by kind and name, the parameters and buffers.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._places: dict[str, tuple[dict[str, Any], str, Remote]] = {}
        self.tensors: dict[Kind, dict[str, Remote]] = {Kind.PARAMETER: {}, Kind.BUFFER: {}}

    def add(self, module: nn.Module, names: Iterable[str]) -> None:
        """Make proxies of parameters and buffers.

        Args:
            module: the LightningModule.
            names: names of the parameters and buffers.
        """
        for name in names:
            owner, _, key = name.rpartition(".")
            parameters, buffers = tables(module.get_submodule(owner))
            self._open(name, buffers if parameters.get(key) is None else parameters, key)

    def replaced(self) -> Iterator[Remote]:
        """Make proxies of the buffers that code has put in the place of others, and yield them.

        Raises:
            HybridError: a parameter was replaced.
        """
        for name, (place, key, known) in self._places.items():
            value = place.get(key)
            if value is known.value:
                continue
            if known.kind is Kind.PARAMETER or not isinstance(value, Tensor):
                raise HybridError(
                    f"{known.kind.value} {known.name!r} was replaced by {type(value).__name__} in "
                    "the middle of a run, but another rank owns it. Change its values in place "
                    "(parameter.copy_(...), load_state_dict) instead."
                )
            make_plain(known.value)
            # (as by `self.count += 1` in inference mode; an inference tensor could not be written
            # to in training)
            if value.is_inference():
                with torch.inference_mode(False):
                    place[key] = value.clone()
            yield self._open(name, place, key)

    def names(self, *kinds: Kind) -> set[str]:
        """Names of the parameters (or buffers) that other ranks own; no kind: of both."""
        return {name for kind in kinds or self.tensors for name in self.tensors[kind]}

    def emptied(self) -> AbstractContextManager[None]:
        """Inside, tensors that other ranks own have no memory here; computing with them raises."""
        return emptied({remote.name: remote.value for remote in self.all()})

    def hide(self) -> None:
        """Make ordinary tensors of the parameters and buffers, until :meth:`show`."""
        for remote in self.all():
            make_plain(remote.value)

    def show(self) -> None:
        """Make proxies again of the parameters and buffers, after :meth:`hide`."""
        for place, key, known in self._places.values():
            if place.get(key) is known.value:  # (`replaced` handles those that are others now)
                make_proxy(known.value, known)

    def close(self) -> None:
        """Make ordinary tensors of all proxies, also of views, at the end of a run."""
        self.hide()
        known = {id(remote) for remote in self.all()}
        # (the user's code may keep views, which must not ask workers that have ended)
        for view in proxies():
            if id(source_of(view)) in known:
                make_plain(view)
        self._places.clear()
        for tensors in self.tensors.values():
            tensors.clear()

    def all(self) -> list[Remote]:
        """All parameters and buffers that other ranks own."""
        return [remote for tensors in self.tensors.values() for remote in tensors.values()]

    def _open(self, name: str, place: dict[str, Any], key: str) -> Remote:
        """Make a proxy of a tensor in a module.

        Args:
            name: its name in the LightningModule.
            place: the table of a module that it is in.
            key: its key there.
        """
        value = place[key]
        kind = Kind.PARAMETER if isinstance(value, nn.Parameter) else Kind.BUFFER
        known = self.tensors[kind].get(name)
        if known is None or known.value is not value:
            known = self.tensors[kind][name] = Remote(self._table, kind, name, value)
        self._places[name] = (place, key, known)
        make_proxy(value, known)
        return known


def refuse_shared(module: nn.Module, names: Iterable[str]) -> None:
    """Refuse parameters that other ranks are to own and whose memory something else here shows too.

    A change on the other rank would not be seen there, nor a change there on the other rank; and a
    write through such a view leaves no trace that could be noticed later.

    Args:
        module: the LightningModule.
        names: names of the tensors that other ranks are to own.

    Raises:
        NetworkError: there is such a parameter.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    # (torch's older `spectral_norm` has a view of `weight_orig` as `weight`, until its first call)
    replaced = [
        vars(part).get(key.removesuffix("_orig"))
        for part in module.modules()
        for key in tables(part)[0]
    ]
    with as_they_are():
        in_memory: dict[int, dict[int, Tensor]] = {}
        for tensor in (*parameters.values(), *module.buffers(), *replaced):
            if tensor is not None and _is_strided(tensor):
                in_memory.setdefault(_memory(tensor), {})[id(tensor)] = tensor
        for name in names:
            parameter = parameters.get(name)
            if parameter is None or not _is_strided(parameter):
                continue
            known = in_memory[_memory(parameter)]
            others = [t for key, t in known.items() if key not in map(id, (parameter, *replaced))]
            # (cuDNN has all weights of a recurrent layer side by side in one storage)
            overlaps = any(_overlap(other, parameter) for other in others)
            if overlaps or _has_holders(parameter, besides=len(known) - 1):
                raise NetworkError(
                    f"Another tensor shows the memory of {name!r}, which another rank is to own, "
                    "and would not change with it. Of what was taken by `data`, `detach()` or "
                    "`state_dict()` keep a copy (`parameter.data.clone()`); give a parameter that "
                    "is a part of a larger tensor its own memory (`parameter.data = part.clone()`);"
                    " instead of `a.data = b.data` write `module.a = module.b`."
                )


def _has_holders(parameter: Tensor, *, besides: int) -> bool:
    """Whether more than so many other tensors that are in use show the memory of a parameter."""
    if not is_shared(parameter, besides=besides):
        return False
    gc.collect()  # (what it finds is not in use)
    return is_shared(parameter, besides=besides)


def _memory(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _overlap(one: Tensor, other: Tensor) -> bool:
    (first, end), (other_first, other_end) = _extent(one), _extent(other)
    return first < other_end and other_first < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The positions in its storage of a tensor's first byte and of the byte behind its last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _is_strided(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not is_wrapped(tensor)
    return dense and not is_deferred(tensor) and tensor.numel() > 0
