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
* ``parameter.grad`` is a proxy on the worker's gradient; setting and clearing it travels too. Who
  keeps a gradient that is cleared keeps its values.
* A parameter may enter the graph (a penalty). Its gradient then arises on the driver and is added
  to the worker's before anything uses that.

Copies and pickles are ordinary tensors. Nothing here costs anything until a proxy is used, but a
look at its class by torch; our own code looks at the tensors as they are (:func:`as_they_are`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_hybrid._torch.autograd import outside_of_transforms
from lightning_hybrid._torch.tensors import as_they_are, same_numbers
from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote.deferred import (
    give_up,
    is_deferred,
    is_vacant,
    occupy,
    vacate,
    value_of,
)
from lightning_hybrid.remote.living_views import View
from lightning_hybrid.remote.proxy import make_plain, make_proxy
from lightning_hybrid.remote.remote_gradients import RemoteGradients
from lightning_hybrid.remote.remote_places import RemotePlaces
from lightning_hybrid.remote.remote_source import Kind, Remote, RemoteStore
from lightning_hybrid.remote.unread import is_unread, left_unread


class RemoteTensors:
    """The proxies of one driver.

    Each kind has an *age*, which ends when the owners change what they have.

    Args:
        owners: of the tensors.
        device: of this rank. To the user's code all of them are there; those that nobody has read
            may be on the CPU still.

    Attributes:
        device: that one.
        places: of the parameters and buffers in the module.
        gradients: of the parameters.
        in_graph: whether a proxy has entered the graph of this step.
        changed_here: whether code on this rank has changed a parameter or buffer.
    """

    def __init__(self, owners: RemoteStore, device: torch.device) -> None:
        self._owners, self.device = owners, device
        self.places = RemotePlaces(self)
        self._tensors: dict[Kind, dict[str, Remote]] = {**self.places.tensors, Kind.GRADIENT: {}}
        self._here_too: set[str] = set()
        self._age = dict.fromkeys(Kind, 0)
        self._reads = dict.fromkeys(Kind, 0)
        self._touched: dict[tuple[Kind, str], Remote] = {}
        self.gradients = RemoteGradients(
            self, owners, self._tensors[Kind.PARAMETER], self._tensors[Kind.GRADIENT]
        )
        self._busy = False
        self._at_hand = False  # see at_hand
        self._writes = 0
        self._here: list[Remote] = []  # what has memory that it may give back
        self._brought: dict[str, Tensor] = {}
        self.in_graph = self.changed_here = False

    def add(
        self,
        module: nn.Module,
        names: Iterable[str],
        here_too: Iterable[str] = (),
        views: Iterable[View] = (),
    ) -> None:
        """Make proxies of these parameters and buffers of ``module``.

        Args:
            module: the LightningModule.
            names: of what other ranks own.
            here_too: names of buffers that stages of this rank use as well. What is here is what
                the owner has: they are constants (a network is not cut between two uses of a
                buffer that it changes), or running statistics of a copied stage, which each copy
                updates alike.
            views: what code has taken of them, see :func:`living_views`. (They are sent before
                this, and messages on their way show their memory, too.)

        Raises:
            NetworkError: one shares its memory with another parameter, or with a larger tensor.
        """
        self._here_too.update(here_too)
        self.places.add(module, names, views)
        # what this step has computed before, it has computed with ordinary tensors
        self.gradients.in_graph |= self._tensors[Kind.PARAMETER]
        self.in_graph = True

    def vacate(self, but: Collection[str] = ()) -> None:
        """Give the memory of parameters back: they have it for as long as they are read.

        Args:
            but: names of those that stages of this rank compute with.
        """
        named = self._tensors[Kind.PARAMETER].items()
        self._here = [remote for name, remote in named if name not in but]
        self._leave()

    def _leave(self) -> None:
        """Of parameters that have memory: give it back where nothing needs it."""
        left = []
        for remote in self._here:
            vacate(remote.value)
            if is_vacant(remote.value):
                remote.seen = None
            else:
                left.append(remote)
        self._here = left

    def begin_step(self) -> None:
        """A training step begins, with nothing in its graph."""
        if self.in_graph:
            self.gradients.in_graph.clear()
        self.in_graph = False

    def close(self) -> None:
        """Make ordinary tensors of all proxies again."""
        # (the places forget their tensors, and gradients are put on them after that)
        parameters = dict(self._tensors[Kind.PARAMETER])
        self.places.close()
        for name, remote in parameters.items():
            give_up(remote.value, name)
        for name, gradient in self._brought.items():
            parameter = parameters[name].value
            if not is_unread(parameter):
                gradient = value_of(gradient).to(parameter.device)
            parameter.grad = gradient
        self._brought = {}
        for table in (self._touched, self._here_too, self.gradients, self._tensors[Kind.GRADIENT]):
            table.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, there are no proxies: for code of ours that looks at a whole network."""
        self.flush()
        self.places.hide()
        try:
            yield
        finally:
            self.places.show()

    @contextmanager
    def showing(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, parameters and buffers are ordinary tensors with these numbers.

        Args:
            values: by name.
        """
        with self.suspended(), torch.no_grad(), ExitStack() as stack:
            found = [remote for remote in self.places.all() if remote.name in values]
            in_memory = [remote for remote in found if not is_unread(values[remote.name])]
            before = [(remote.value, remote.value.data) for remote in in_memory]
            for remote in found:
                if remote in in_memory:
                    remote.value.data = values[remote.name]
                elif not is_deferred(remote.value):  # one that is tied is there twice
                    stack.enter_context(left_unread(remote.value, remote.name, values[remote.name]))
            try:
                yield
            finally:
                for tensor, data in reversed(before):  # one that is tied is there twice
                    tensor.data = data

    # -- what an optimizer that steps whole does

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
            present, gradients = self.gradients.names(), self._tensors[Kind.GRADIENT]
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
            self.gradients.assigned[remote.name] = gradient
        elif held is not None and held.changed:
            self.touch(held)

    # -- what the owners do

    def outdate(self, *kinds: Kind) -> None:
        """The owners change what they have."""
        for kind in kinds:
            self._age[kind] += 1
            # (a first read fetches one tensor alone, see `read`)
            self._reads[kind] = 0
            if kind is Kind.GRADIENT:
                self.gradients.outdate()
            elif kind is Kind.PARAMETER and self._here:
                self._leave()

    def flush(self) -> None:
        """Before a command: bring the owners what was changed here.

        Raises:
            HybridError: a view of an outdated value was changed.
        """
        if self._busy or self._at_hand or not (self._touched or self.gradients.pending):
            return
        # what is sent is read here, which would flush again
        self._busy = True
        try:
            with as_they_are():
                if self.gradients.send_arisen():
                    self.outdate(Kind.GRADIENT)
                assigned = self.gradients.send_assigned()
                for name in assigned:  # proxies on what was there before have nothing to say now
                    self._touched.pop((Kind.GRADIENT, name), None)
                if assigned:
                    self.outdate(Kind.GRADIENT)
                self._send_changed()
        finally:
            self._busy = False

    def adopt_fetched(self) -> None:
        """Weights and buffers are here as the owners have them, all of them."""
        for remote in self.places.all():
            if not is_vacant(remote.value):
                remote.seen = self._age[remote.kind]
                remote.settle()
        self._writes += 1

    def adopt(self, names: Iterable[str]) -> None:
        """These parameters are here as the owners have them."""
        for name in names:
            remote = self._tensors[Kind.PARAMETER][name]
            remote.seen = self._age[Kind.PARAMETER]
            remote.settle()

    def bring_gradients(self) -> None:
        """The owners go: from :meth:`close` on parameters have here the gradients that are left."""
        if not self._tensors[Kind.PARAMETER]:
            return
        self.flush()
        with torch.no_grad(), as_they_are():
            parameters, names = self._tensors[Kind.PARAMETER], self.gradients.names()
            here = [name for name in names if not is_deferred(parameters[name].value)]
            if not here:
                return
            values = self._owners.give(Kind.GRADIENT, here)  # of which some may be sparse
            self._brought = {n: v.to(parameters[n].value.device) for n, v in values.items()}
        self._keep_shown()
        self._owners.clear_gradients(here)  # the next run brings them from here

    def leave_gradients(self, values: Mapping[str, Tensor]) -> None:
        """The owners go, and leave these gradients, which parameters have from :meth:`close` on.

        Args:
            values: by name of the parameter; memory of this rank.
        """
        parameters = self._tensors[Kind.PARAMETER]
        self._brought = {name: value for name, value in values.items() if name in parameters}
        self._keep_shown()
        self._owners.clear_gradients([*self._brought])  # the next run brings them from here

    def _keep_shown(self) -> None:
        """Fetch gradients into the same tensors that user code already has proxies of."""
        with torch.no_grad(), as_they_are():
            for remote in self.gradients.kept(self._brought):
                if self._brought[remote.name].layout is torch.strided:
                    value = value_of(self._brought[remote.name])
                    self._brought[remote.name] = remote.value.copy_(value)
                remote.keep()

    def adopt_replaced(self) -> None:
        """Before a forward: bring the owners the buffers that were replaced here.

        Raises:
            HybridError: a parameter was replaced.
        """
        for remote in self.places.replaced():
            self.touch(remote)

    # -- what the user's code does

    def read(self, remote: Remote) -> None:
        """Fetch what the owner has, unless that is here already."""
        kind, age = remote.kind, self._age[remote.kind]
        self._touched[kind, remote.name] = remote  # who reads may keep a view
        if remote.name in self._here_too and kind is Kind.BUFFER:
            remote.seen = age
        if remote.seen == age:
            return
        with outside_of_transforms():
            self.flush()
            # one alone the first time: a look at a single weight must not bring a whole network
            wanted = [remote]
            if self._reads[kind]:
                wanted = [r for r in self._tensors[kind].values() if r.seen != age]
                if kind is Kind.GRADIENT:
                    wanted = [r for r in wanted if r is remote or r.name in self.gradients.known]
            self._reads[kind] += 1
            with torch.no_grad():
                self._fetch(wanted)

    def read_all(self) -> None:
        """Have all parameters here as the owners have them."""
        with as_they_are():
            for name in [*self._tensors[Kind.PARAMETER]]:
                self.read(self._tensors[Kind.PARAMETER][name])

    def bring(self, prefix: str) -> None:
        """Have the parameters and buffers of a module here as the owners have them.

        Args:
            prefix: with which their names begin.
        """
        self.fetch(name for name in self.places.names() if name.startswith(prefix))

    def fetch(self, names: Iterable[str]) -> None:
        """Have these parameters and buffers here as the owners have them, in one go."""
        wanted = set(names)
        if not wanted:
            return
        self.flush()
        with torch.no_grad(), as_they_are():
            for remotes in self.places.tensors.values():
                self._fetch([remotes[name] for name in wanted & remotes.keys()])

    def absent_bytes(self, prefix: str) -> int:
        """Memory that the parameters of a module need which have none here.

        Args:
            prefix: with which their names begin.
        """
        named = self._tensors[Kind.PARAMETER].items()
        values = [remote.value for name, remote in named if name.startswith(prefix)]
        return sum(value.nbytes for value in values if is_vacant(value))

    def state(self, kind: Kind) -> object:
        """Equal as long as neither the owners nor this rank have changed anything."""
        return self._age[kind], self._writes

    def touch(self, remote: Remote) -> None:
        """Note that a remote tensor was written to here."""
        remote.written = True
        self._touched[remote.kind, remote.name] = remote

    def enter_graph(self, remote: Remote) -> None:
        """Note that a remote tensor takes part in a computation that autograd records."""
        self.in_graph = True
        self.gradients.in_graph[remote.name] = remote

    def note_use(self, names: Iterable[str]) -> None:
        """Stages of this rank take these parameters into the graph."""
        for name in names:
            self.enter_graph(self._tensors[Kind.PARAMETER][name])

    def gradient(self, remote: Remote) -> Tensor | None:
        """A proxy on the gradient of a parameter, if it has one."""
        if not self.gradients.is_settled(remote):
            self.flush()  # it may have arisen here
        return self.gradients.proxy(remote)

    def assign_gradient(self, remote: Remote, value: Tensor | None) -> None:
        """``parameter.grad = value``."""
        if self.gradients.has(remote, value):
            return  # as in `parameter.grad *= 2`: the proxy has been written to
        self.release_gradients([remote.name])
        self.gradients.assign(remote, value)

    def release_gradients(self, names: Iterable[str]) -> None:
        """Parameters are about to lose their gradients; who has kept one keeps it as it is now."""
        names = [name for name in names if name in self._tensors[Kind.GRADIENT]]
        if self.gradients.kept(names):
            self.flush()
            with torch.no_grad(), as_they_are():
                self._fetch(self.gradients.kept(names))
        for name in names:
            self.gradients.release(name)
            self._touched.pop((Kind.GRADIENT, name), None)

    # -- inside

    def _fetch(self, wanted: Iterable[Remote]) -> None:
        """Have here what the owners have, of tensors of one kind.

        Raises:
            HybridError: a sparse gradient, for which there is dense memory here.
        """
        stale = [r for r in wanted if r.seen != self._age[r.kind]]
        if not stale:
            return
        kind, fetched = stale[0].kind, {id(remote.value) for remote in stale}
        empty = {remote.name for remote in stale if self._make_room(remote)}
        brought = self._bring(kind, stale)
        rest = [remote for remote in stale if remote.name not in brought]
        values = self._owners.give(kind, [r.name for r in rest]) if rest else {}
        for remote in rest:
            if values[remote.name].layout is not torch.strided:
                raise HybridError(
                    f"The gradient of {remote.name!r}, which another rank owns, is sparse, and was "
                    "read here. Only an optimizer of configure_optimizers can use it there; for "
                    "any other use make it dense (torch.nn.Embedding(sparse=False))."
                )
            # a graph may have saved it, and autograd refuses what was written to since
            value = values[remote.name]
            if remote.name in empty or not same_numbers(remote.value, value.to(self.device)):
                remote.value.copy_(value)
        for remote in stale:
            remote.seen = self._age[kind]
            remote.settle()
        for other in self._tensors[kind].values():
            if id(other.value) in fetched:  # tied, it has another name in another network
                other.seen = self._age[kind]
                other.settle()

    def _make_room(self, remote: Remote) -> bool:
        """Have memory for a tensor on this device. Returns whether there was none."""
        if is_vacant(remote.value):
            occupy(remote.value, self.device)
            self._here.append(remote)
            return True
        if remote.value.device != self.device:
            remote.value.data = remote.value.data.to(self.device)
        return False

    def _bring(self, kind: Kind, stale: Iterable[Remote]) -> Collection[str]:
        """Have the owners write into the memory here. Returns the names of what has come."""
        if kind is Kind.BUFFER:  # their sizes may change
            return ()
        # whether the numbers are others is not looked at: they may not be if this graph has them
        saved = self.gradients.in_graph if kind is Kind.PARAMETER else {}
        memory = {r.name: r.value for r in stale if r.name not in saved}
        brought = self._owners.bring(kind, memory)
        for name in brought:
            if not memory[name].is_inference():  # these count nothing
                increment_version(memory[name])
        return brought

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
            self.changed_here |= kind is not Kind.GRADIENT
