"""What other ranks own, as the user's code on the driver sees it.

The weights, buffers and gradients of the earlier stages live on the workers, but users read and
change them in the middle of a run as on one device: they log norms, clip by hand, clear gradients,
average or load weights, add a penalty over all parameters. So on the driver those parameters and
buffers become *proxies*: the same objects, of a class that intercepts every operation on them.

* Reading fetches what the worker has now, once until it changes there: the first tensor alone,
  with the second all of them, since who reads two mostly reads all.
* A change in place travels back before the next command to the workers; so do changes through a
  view (seen by the version counter), through ``data`` and ``detach()`` (proxies themselves), and
  buffers that were replaced.
* ``parameter.grad`` is a proxy on the worker's gradient; setting and clearing it travels too.
* A parameter may enter the graph (a penalty). Its gradient then arises on the driver and is added
  to the worker's before anything uses that.

Copies and pickles are ordinary tensors. Nothing here costs anything until a proxy is used, but a
look at its class by torch; our own code looks at the tensors as they are (:func:`as_they_are`).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.modules import tables
from lightning_hybrid._torch.tensors import as_they_are, version
from lightning_hybrid.errors import HybridError
from lightning_hybrid.tensors.emptied import emptied
from lightning_hybrid.tensors.kind import Kind
from lightning_hybrid.tensors.proxy import make_plain, make_proxy, source_of

_KINDS = (Kind.PARAMETER, Kind.BUFFER)


class RemoteStore(Protocol):
    """The ranks that own the tensors; names are those of the LightningModule."""

    def give(self, kind: Kind, names: list[str]) -> Mapping[str, Tensor]:
        """What these tensors are now."""

    def take(self, kind: Kind, values: Mapping[str, Tensor], *, add: bool = False) -> None:
        """Set them, or add to them."""

    def clear_gradients(self, names: list[str]) -> None:
        """``parameter.grad = None``."""

    def gradient_names(self) -> set[str]:
        """Of the parameters that have a gradient."""


class Remote:
    """One tensor of another rank, and what this rank knows of it.

    Attributes:
        value: the memory that proxies show here; a parameter or buffer itself.
        seen: the age (see :class:`RemoteTensors`) in which ``value`` was fetched; ``None``: never.
        version: of ``value`` when it was last equal to the owner's.
        written: changed by an operation that the version of ``value`` does not count.
    """

    __slots__ = ("kind", "name", "seen", "table", "value", "version", "written")

    def __init__(self, table: "RemoteTensors", kind: Kind, name: str, value: Tensor) -> None:
        self.table, self.kind, self.name, self.value = table, kind, name, value
        self.seen: int | None = None
        self.version = version(value)
        self.written = False

    def read(self) -> None:
        """Have here what the owner has."""
        self.table.read(self)

    def touch(self) -> None:
        """It was written to in a way that only the proxy has seen."""
        self.table.touch(self)

    def enter_graph(self) -> None:
        """It takes part in a computation that autograd records."""
        self.table.enter_graph(self)

    def gradient(self) -> Tensor | None:
        """A proxy on the gradient of a parameter, if it has one."""
        return self.table.gradient(self)

    def assign_gradient(self, value: Tensor | None) -> None:
        """``parameter.grad = value``."""
        self.table.assign_gradient(self, value)

    @property
    def changed(self) -> bool:
        return self.written or (self.seen is not None and version(self.value) != self.version)

    def settle(self) -> None:
        """``value`` is what the owner has."""
        self.version, self.written = version(self.value), False


class RemoteTensors:
    """The proxies of one driver.

    Each kind has an *age*, which ends when the owners change what they have.

    Args:
        owners: of the tensors.

    Attributes:
        in_graph: whether a proxy has entered the graph of this step.
    """

    def __init__(self, owners: RemoteStore) -> None:
        self._owners = owners
        self._tensors: dict[Kind, dict[str, Remote]] = {kind: {} for kind in Kind}
        self._places: dict[str, tuple[dict[str, Any], str, Remote]] = {}
        self._here_too: set[str] = set()
        self._age = dict.fromkeys(Kind, 0)
        self._reads = dict.fromkeys(Kind, 0)
        self._touched: dict[tuple[Kind, str], Remote] = {}
        self._in_graph: dict[str, Remote] = {}
        self._present: set[str] | None = None
        self._assigned: dict[str, Tensor | None] = {}
        self._busy = False
        self._at_hand = False  # see at_hand
        self._writes = 0
        self.in_graph = False

    def add(self, module: nn.Module, names: Iterable[str], here_too: Iterable[str] = ()) -> None:
        """Make proxies of these parameters and buffers of ``module``.

        Args:
            module: the LightningModule.
            names: of what other ranks own.
            here_too: names of buffers that stages of this rank use as well. A network is not cut
                between two uses of a buffer that it changes, so these are constants: what is here
                is what the owner has.
        """
        self._here_too.update(here_too)
        for name in names:
            owner, _, key = name.rpartition(".")
            parameters, buffers = tables(module.get_submodule(owner))
            self._open(name, buffers if parameters.get(key) is None else parameters, key)
        # what this step has computed before, it has computed with ordinary tensors
        self._in_graph |= self._tensors[Kind.PARAMETER]
        self.in_graph = True

    def begin_step(self) -> None:
        """A training step begins, with nothing in its graph."""
        if self.in_graph:
            self._in_graph.clear()
        self.in_graph = False

    def close(self) -> None:
        """Make ordinary tensors of all proxies again."""
        self._make_plain()
        for table in (self._places, self._touched, self._assigned, self._in_graph, self._here_too):
            table.clear()
        for tensors in self._tensors.values():
            tensors.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, there are no proxies: for code of ours that looks at a whole network."""
        self.flush()
        self._make_plain()
        try:
            yield
        finally:
            for place, key, known in self._places.values():
                if place.get(key) is known.value:  # else it was replaced, which a forward settles
                    make_proxy(known.value, known)

    def emptied(self) -> AbstractContextManager[None]:
        """Inside, what other ranks own has no memory here; computing with it raises."""
        return emptied({r.name: r.value for kind in _KINDS for r in self._tensors[kind].values()})

    def names(self) -> set[str]:
        """What other ranks own."""
        return {name for kind in _KINDS for name in self._tensors[kind]}

    # -- what an optimizer that steps whole does

    def move(self, names: Iterable[str], device: torch.device) -> None:
        """Give parameters their memory on this rank's device: what other ranks own waits on CPU."""
        self.flush()
        with as_they_are():
            for name in names:
                value = self._tensors[Kind.PARAMETER][name].value
                if value.device != device:
                    value.data = value.data.to(device)
                    self._tensors[Kind.GRADIENT].pop(name, None)

    @contextmanager
    def at_hand(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, parameters and their gradients are here, as ordinary tensors.

        Afterwards the owners get the parameters (code that writes through ``data`` leaves no
        trace of it), and the gradients that have visibly changed.

        Args:
            names: of parameters of other ranks.
        """
        self.flush()
        parameters = [self._tensors[Kind.PARAMETER][name] for name in names]
        with torch.no_grad(), as_they_are():
            self._fetch(parameters)
            present, gradients = self._present_names(), self._tensors[Kind.GRADIENT]
            held = {r.name: gradients[r.name] for r in parameters if r.name in present}
            self._fetch(held.values())
        for remote in parameters:
            make_plain(remote.value)
            remote.value.grad = held[remote.name].value if remote.name in held else None
        self._at_hand = True
        try:
            yield
        finally:
            self._at_hand = False
            for remote in parameters:
                self._take_back(remote, held.get(remote.name))

    def _take_back(self, remote: Remote, held: Remote | None) -> None:
        gradient, remote.value.grad = remote.value.grad, None
        make_proxy(remote.value, remote)
        self.touch(remote)
        if gradient is not (held and held.value):
            self._assigned[remote.name] = gradient
        elif held is not None and held.changed:
            self.touch(held)

    # -- what the owners do

    def outdate(self, *kinds: Kind) -> None:
        """The owners change what they have."""
        for kind in kinds:
            self._age[kind] += 1
            self._reads[kind] = 0
            if kind is Kind.GRADIENT:
                self._present = None

    def flush(self) -> None:
        """Before a command: bring the owners what was changed here.

        Raises:
            HybridError: a parameter was replaced, or a view of an outdated value changed.
        """
        if self._busy or self._at_hand or not (self._touched or self._assigned or self._in_graph):
            return
        self._busy = True
        try:
            with as_they_are():
                self._add_gradients()
                self._send_assigned()
                self._send_changed()
        finally:
            self._busy = False

    def adopt_fetched(self) -> None:
        """Weights and buffers are here as the owners have them, all of them."""
        for kind in (Kind.PARAMETER, Kind.BUFFER):
            for remote in self._tensors[kind].values():
                remote.seen = self._age[kind]
                remote.settle()
        self._writes += 1

    def adopt_replaced(self) -> None:
        """Before a forward: bring the owners the buffers that were replaced here.

        Raises:
            HybridError: a parameter was replaced.
        """
        for name, (place, key, known) in self._places.items():
            if place.get(key) is not known.value:
                self._replace(name, place.get(key))

    # -- what the user's code does

    def read(self, remote: Remote) -> None:
        """Fetch what the owner has, unless that is here already."""
        kind, age = remote.kind, self._age[remote.kind]
        self._touched[kind, remote.name] = remote  # who reads may keep a view
        if remote.name in self._here_too and kind is Kind.BUFFER:
            remote.seen = age
        if remote.seen == age:
            return
        self.flush()
        wanted = [remote]
        if self._reads[kind]:
            wanted = [r for r in self._tensors[kind].values() if r.seen != age]
            if kind is Kind.GRADIENT:
                wanted = [r for r in wanted if r is remote or r.name in (self._present or ())]
        self._reads[kind] += 1
        with torch.no_grad():
            self._fetch(wanted)

    def read_all(self, names: Iterable[str]) -> None:
        """Have these parameters here as the owners have them."""
        with as_they_are():
            for name in names:
                self.read(self._tensors[Kind.PARAMETER][name])

    def state(self, kind: Kind) -> object:
        """Equal as long as neither the owners nor this rank have changed anything."""
        return self._age[kind], self._writes

    def touch(self, remote: Remote) -> None:
        """It was written to."""
        remote.written = True
        self._touched[remote.kind, remote.name] = remote

    def enter_graph(self, remote: Remote) -> None:
        """It takes part in a computation that autograd records."""
        self.in_graph = True
        self._in_graph[remote.name] = remote

    def note_use(self, names: Iterable[str]) -> None:
        """Stages of this rank take these parameters into the graph."""
        for name in names:
            self.enter_graph(self._tensors[Kind.PARAMETER][name])

    def gradient(self, remote: Remote) -> Tensor | None:
        """A proxy on the gradient of a parameter, if it has one."""
        name = remote.name
        if name in self._assigned:
            return self._assigned[name]
        if self._in_graph:
            self.flush()  # its gradient may have arisen here
        if name not in self._present_names():
            return None
        found = self._tensors[Kind.GRADIENT][name]
        return make_proxy(found.value.detach(), found)

    def assign_gradient(self, remote: Remote, value: Tensor | None) -> None:
        """``parameter.grad = value``."""
        other = source_of(value)
        if isinstance(other, Remote):
            if (other.kind, other.name) == (Kind.GRADIENT, remote.name):
                return  # as in `parameter.grad *= 2`: the proxy has been written to
            other.read()
        with as_they_are():
            remote.value.grad = value  # torch's own check of shape, dtype and device
            remote.value.grad = None
        self._assigned[remote.name] = value

    # -- inside

    def _fetch(self, wanted: Iterable[Remote]) -> None:
        """Have here what the owners have, of tensors of one kind."""
        stale = [r for r in wanted if r.seen != self._age[r.kind]]
        if not stale:
            return
        values = self._owners.give(stale[0].kind, [r.name for r in stale])
        for remote in stale:
            remote.value.copy_(values[remote.name])
            remote.seen = self._age[remote.kind]
            remote.settle()

    def _present_names(self) -> set[str]:
        """Of the gradients that the owners have; there is memory for them here."""
        if self._present is None:
            self.flush()
            self._present = self._owners.gradient_names()
        gradients = self._tensors[Kind.GRADIENT]
        if not self._present <= gradients.keys():
            with torch.inference_mode(False), as_they_are():
                for name in self._present - gradients.keys():  # a second read fetches all
                    memory = torch.zeros_like(self._tensors[Kind.PARAMETER][name].value)
                    gradients[name] = Remote(self, Kind.GRADIENT, name, memory.detach())
        return self._present

    def _open(self, name: str, place: dict[str, Any], key: str) -> None:
        value = place[key]
        kind = Kind.PARAMETER if isinstance(value, nn.Parameter) else Kind.BUFFER
        known = self._tensors[kind].get(name)
        if known is None or known.value is not value:
            known = self._tensors[kind][name] = Remote(self, kind, name, value)
        self._places[name] = (place, key, known)
        make_proxy(value, known)

    def _make_plain(self) -> None:
        for kind in (Kind.PARAMETER, Kind.BUFFER):
            for remote in self._tensors[kind].values():
                make_plain(remote.value)

    def _replace(self, name: str, value: Any) -> None:
        place, key, known = self._places[name]
        if known.kind is Kind.PARAMETER or not isinstance(value, Tensor):
            raise HybridError(
                f"{known.kind.value} {known.name!r} was replaced by "
                f"{type(value).__name__} in the middle of a run, but another rank owns it. Change "
                "its values in place (parameter.copy_(...), load_state_dict) instead."
            )
        make_plain(known.value)
        self._open(name, place, key)
        self.touch(self._tensors[Kind.BUFFER][name])

    def _add_gradients(self) -> None:
        """The gradients that the user's own use of parameters has left here."""
        found = {}
        for name, remote in self._in_graph.items():
            if remote.value.grad is not None:
                found[name], remote.value.grad = remote.value.grad, None
        if found:
            self._owners.take(Kind.GRADIENT, found, add=True)
            self.outdate(Kind.GRADIENT)

    def _send_assigned(self) -> None:
        if not self._assigned:
            return
        assigned, self._assigned = self._assigned, {}
        cleared = [name for name, value in assigned.items() if value is None]
        if cleared:
            self._owners.clear_gradients(cleared)
        values = {name: value for name, value in assigned.items() if value is not None}
        if values:
            self._owners.take(Kind.GRADIENT, values)
        for name in assigned:  # proxies on what was there before have nothing to say any more
            self._touched.pop((Kind.GRADIENT, name), None)
            self._tensors[Kind.GRADIENT].pop(name, None)
        self.outdate(Kind.GRADIENT)

    def _send_changed(self) -> None:
        changed: dict[Kind, dict[str, Tensor]] = {}
        for (kind, name), remote in self._touched.items():
            if remote.changed:
                if remote.seen != self._age[kind] and not remote.written:
                    raise HybridError(
                        f"A view of {kind.value} {name!r}, which another rank owns, was changed "
                        "after that rank had updated it. Take the view anew from the "
                        f"{kind.value}, or change the {kind.value} itself."
                    )
                changed.setdefault(kind, {})[name] = remote.value
                remote.settle()
        for kind, values in changed.items():
            self._owners.take(kind, values)
            self._writes += 1
