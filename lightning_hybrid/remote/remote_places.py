"""The parameters and buffers of the user's module that other ranks own, and that are proxies."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.modules import tables
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote.hollow_network import emptied
from lightning_hybrid.remote.living_views import View, refuse_larger, refuse_one_memory
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

    def add(self, module: nn.Module, names: Iterable[str], views: Iterable[View]) -> None:
        """Make proxies of parameters and buffers, and of views of them.

        Args:
            module: the LightningModule.
            names: names of the parameters and buffers.
            views: views of tensors of the module; those of other tensors are left out.

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
        for view, value in views:  # (as taken by `data`, or from a state dict)
            if id(value) not in remotes:
                continue
            refuse_larger(view, value, remotes[id(value)].name)
            make_proxy(view, remotes[id(value)])

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
