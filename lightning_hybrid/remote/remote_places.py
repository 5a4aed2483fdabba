"""Where the parameters and buffers of other ranks stand in the user's module."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.modules import tables
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote.hollow_network import emptied
from lightning_hybrid.remote.living_views import View, refuse_larger, refuse_one_memory
from lightning_hybrid.remote.proxy import make_plain, make_proxy, proxies, source_of
from lightning_hybrid.remote.remote_source import Kind, Remote, Table


class RemotePlaces:
    """The parameters and buffers of other ranks, each at its place in a module.

    Args:
        table: of all remote tensors, which their proxies ask.

    Attributes:
        tensors: by kind and name, what stands here.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._places: dict[str, tuple[dict[str, Any], str, Remote]] = {}
        self.tensors: dict[Kind, dict[str, Remote]] = {Kind.PARAMETER: {}, Kind.BUFFER: {}}

    def add(self, module: nn.Module, names: Iterable[str], views: Iterable[View]) -> None:
        """Make proxies of these parameters and buffers of ``module``, and of views of them.

        Raises:
            NetworkError: one shares its memory with another parameter, or with a larger tensor.
        """
        names = list(names)
        refuse_one_memory(module, names)
        for name in names:
            owner, _, key = name.rpartition(".")
            parameters, buffers = tables(module.get_submodule(owner))
            self._open(name, buffers if parameters.get(key) is None else parameters, key)
        remotes = {id(remote.value): remote for remote in self.all()}
        for view, value in views:  # (`data`, a state dict): it shows what the owners have
            if id(value) not in remotes:
                continue
            refuse_larger(view, value, remotes[id(value)].name)
            make_proxy(view, remotes[id(value)])

    def replaced(self) -> Iterator[Remote]:
        """The buffers that code has replaced since the last call; the new ones are proxies now.

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
            # a buffer that was made in inference mode could not be written to in training
            if value.is_inference():  # `self.count += 1` leaves on one device what was there
                with torch.inference_mode(False):
                    place[key] = value.clone()
            yield self._open(name, place, key)

    def names(self, *kinds: Kind) -> set[str]:
        """What other ranks own: of these kinds, or parameters and buffers."""
        return {name for kind in kinds or self.tensors for name in self.tensors[kind]}

    def emptied(self) -> AbstractContextManager[None]:
        """Inside, what other ranks own has no memory here; computing with it raises."""
        return emptied({remote.name: remote.value for remote in self.all()})

    def hide(self) -> None:
        """Make ordinary tensors of the parameters and buffers, until :meth:`show`."""
        for remote in self.all():
            make_plain(remote.value)

    def show(self) -> None:
        """Make proxies of them again."""
        for place, key, known in self._places.values():
            if place.get(key) is known.value:  # else it was replaced, which a forward settles
                make_proxy(known.value, known)

    def close(self) -> None:
        """Make ordinary tensors of everything, views too, for good."""
        self.hide()
        known = {id(remote) for remote in self.all()}
        # code may keep a view anywhere, and would ask a worker that is gone
        for view in proxies():
            if id(source_of(view)) in known:
                make_plain(view)
        self._places.clear()
        for tensors in self.tensors.values():
            tensors.clear()

    def all(self) -> list[Remote]:
        """What other ranks own."""
        return [remote for tensors in self.tensors.values() for remote in tensors.values()]

    def _open(self, name: str, place: dict[str, Any], key: str) -> Remote:
        value = place[key]
        kind = Kind.PARAMETER if isinstance(value, nn.Parameter) else Kind.BUFFER
        known = self.tensors[kind].get(name)
        if known is None or known.value is not value:
            known = self.tensors[kind][name] = Remote(self._table, kind, name, value)
        self._places[name] = (place, key, known)
        make_proxy(value, known)
        return known
