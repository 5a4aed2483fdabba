"""Proxies on the driver for the weights, buffers and gradients that workers own.

The user's code on the driver reads and changes these in the middle of a run as on one device: it
logs norms, clips by hand, clears gradients, averages or loads weights, adds a penalty over all
parameters. So on the driver the workers' parameters and buffers become *proxies*: the same objects,
of a class that intercepts every operation on them.

* Reading fetches the worker's values, once until they change there: the first tensor alone, with
  the second all others, since code that reads two mostly reads all.
* A change in place is sent to the worker before the next command; so are changes through a view
  (noticed by the version counter), through ``data`` and ``detach()`` (proxies themselves), and
  buffers that were replaced.
* ``parameter.grad`` is a proxy of the worker's gradient; setting and clearing it is sent too. A
  cleared gradient that code still refers to keeps its values.
* A parameter may enter autograd's graph (a penalty). Its gradient is then on the driver, and is
  added to the worker's before that is used.

Copies and pickles are ordinary tensors. A proxy that is not used costs nothing. Code of this
package reads the tensors without interception (:func:`as_they_are`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_hybrid._torch.autograd import outside_of_transforms
from lightning_hybrid._torch.modules import tables
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
from lightning_hybrid.remote.hollow_network import watched
from lightning_hybrid.remote.living_views import ViewInMemory, refuse_larger, refuse_one_memory
from lightning_hybrid.remote.proxy import (
    Remote,
    RemoteKind,
    RemoteStore,
    all_proxies,
    make_plain,
    make_proxy,
    make_proxy_again,
    source_of,
)
from lightning_hybrid.remote.remote_gradients import RemoteGradients
from lightning_hybrid.remote.unread import is_unread, left_unread

_IN_MODULES = (RemoteKind.PARAMETER, RemoteKind.BUFFER)


def _freed(fetched: Iterable[Remote], *, in_graph: bool = False) -> list[Remote]:
    """Free the memory of parameters, so that their next read fetches them again.

    Args:
        fetched: the parameters.
        in_graph: whether parameters in autograd's graph are freed too. Then those with changes that
            were not sent to their owners keep their memory.

    Returns:
        The parameters that could not be freed (see `vacate`).
    """
    for remote in fetched:
        if not (in_graph and remote.changed):
            vacate(remote.value, in_graph=in_graph)
        if is_vacant(remote.value):
            remote.seen = None
    return [remote for remote in fetched if not is_vacant(remote.value)]


class Proxies:
    """All proxies of one driver, with what is needed to fetch and send their values.

    For each kind of tensors an *age* counts how often the owners have changed them; a tensor that
    was fetched in an earlier age is stale.

    Args:
        owners: reads and sets the tensors on the ranks that own them.
        device: the device of this rank. Proxies seem to be on it; those that were never read are
            possibly still on the CPU.

    Attributes:
        device: the device of this rank.
        gradients: the gradients of the parameters.
        in_graph: whether a proxy has entered autograd's graph since :meth:`forget_graph`.
        changed: whether code on this rank, or a forward of a network, has changed a parameter or
            buffer.
    """

    def __init__(self, owners: RemoteStore, device: torch.device) -> None:
        self._owners = owners
        self.device = device
        # by name, where in the module each parameter and buffer is: table of a module, key in it
        self._places: dict[str, tuple[dict[str, Any], str, Remote]] = {}
        self._tensors: dict[RemoteKind, dict[str, Remote]] = {kind: {} for kind in RemoteKind}
        self._here_too: set[str] = set()
        self._age = dict.fromkeys(RemoteKind, 0)
        self._reads = dict.fromkeys(RemoteKind, 0)
        self._touched: dict[tuple[RemoteKind, str], Remote] = {}
        self.gradients = RemoteGradients(
            self, owners, self._tensors[RemoteKind.PARAMETER], self._tensors[RemoteKind.GRADIENT]
        )
        self._busy = False
        self._at_hand = False  # whether code runs inside of `at_hand`
        self._writes = 0
        self._here: list[Remote] = []  # parameters with memory that may be freed
        self._lone: list[Remote] | None = None  # those with memory for one operation
        self._brought: dict[str, Tensor] = {}
        self.in_graph = self.changed = False

    def add(
        self,
        module: nn.Module,
        names: Iterable[str],
        here_too: Iterable[str] = (),
        views: Iterable[ViewInMemory] = (),
    ) -> None:
        """Make proxies of these parameters and buffers of ``module``.

        Args:
            module: the LightningModule.
            names: names of the tensors that other ranks own.
            here_too: names of those buffers that stages of this rank use as well. Their values here
                are always those of the owner: they are constants (a network is not cut between two
                uses of a buffer that it changes), or running statistics of a copied stage, which
                each copy updates alike.
            views: views of the user's code in the memory of these tensors (see
                :func:`living_views`), which become proxies too. They must be found before the
                weights are sent, since messages are views of them too.

        Raises:
            NetworkError: one of the tensors shares its memory with another parameter, or with a
                larger tensor.
        """
        self._here_too.update(here_too)
        names = list(names)
        refuse_one_memory(module, names)
        for name in names:
            owner, _, key = name.rpartition(".")
            parameters, buffers = tables(module.get_submodule(owner))
            self._open(name, buffers if parameters.get(key) is None else parameters, key)
        remotes = {id(remote.value): remote for remote in self._owned()}
        for view, value in views:  # (as taken by `data`, or from a state dict)
            if id(value) not in remotes:
                continue
            refuse_larger(view, value, remotes[id(value)].name)
            make_proxy(view, remotes[id(value)])
        # (this step may have computed with any of them already, when they were ordinary tensors)
        parameters = self._tensors[RemoteKind.PARAMETER]
        self.gradients.in_graph |= parameters
        with as_they_are():
            gradients = {name: remote.value.grad for name, remote in parameters.items()}
            self.gradients.note_parts({n: g for n, g in gradients.items() if g is not None})
        self.in_graph = True

    def _open(self, name: str, place: dict[str, Any], key: str) -> Remote:
        """Turn a parameter or buffer of a module into a proxy, and register it.

        Args:
            name: its name in the LightningModule.
            place: the table of parameters or buffers of the module that it is in.
            key: its key in this table.

        Returns:
            What is known of the tensor.
        """
        value = place[key]
        kind = RemoteKind.PARAMETER if isinstance(value, nn.Parameter) else RemoteKind.BUFFER
        known = self._tensors[kind].get(name)
        if known is None or known.value is not value:
            known = self._tensors[kind][name] = Remote(self, kind, name, value)
        self._places[name] = (place, key, known)
        make_proxy(value, known)
        return known

    def names(self, *kinds: RemoteKind) -> set[str]:
        """Return the names of the parameters and buffers that other ranks own.

        Args:
            kinds: the kinds that are named; none: parameters and buffers.
        """
        return {name for kind in kinds or _IN_MODULES for name in self._tensors[kind]}

    def _owned(self) -> list[Remote]:
        """Return all parameters and buffers that other ranks own."""
        return [remote for kind in _IN_MODULES for remote in self._tensors[kind].values()]

    def unreadable(self) -> AbstractContextManager[None]:
        """Inside, an operation that needs a tensor of another rank raises `NoMemory`."""
        values = {remote.name: remote.value for remote in self._owned()}
        return watched(values, set(), values)

    def vacate(self, but: Collection[str] = ()) -> None:
        """Free the memory of parameters of other ranks, now and whenever the owners change them.

        A read fetches the values, which stay in memory until the owners change them next.

        Args:
            but: names of the parameters that stages of this rank compute with.
        """
        named = self._tensors[RemoteKind.PARAMETER].items()
        self._here = [remote for name, remote in named if name not in but]
        self._free_chosen()

    def _free_chosen(self) -> None:
        """Free the memory of the parameters that :meth:`vacate` has chosen, where possible."""
        self._here = _freed(self._here)

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Inside, a parameter without memory is fetched for one operation, and then freed again.

        Code inside must not run a backward through what it computes.
        """
        self._lone = []
        # (a network is called while its proxies are suspended)
        plain = [remote for remote in self._owned() if source_of(remote.value) is None]
        for remote in plain:
            make_proxy(remote.value, remote)
        try:
            yield
        finally:
            self.done()
            for remote in plain:
                make_plain(remote.value)
            self._here += self._lone
            self._lone = None

    def done(self) -> None:
        """Note that an operation is over; inside of :meth:`one_by_one`, free what it has read."""
        if self._lone:
            self._lone = _freed(self._lone, in_graph=True)

    def forget_graph(self) -> None:
        """Forget which proxies have entered autograd's graph so far.

        No backward through what was computed before may follow.
        """
        if self.in_graph:
            self.gradients.in_graph.clear()
        self.in_graph = False

    def close(self) -> None:
        """End the run: turn all proxies into ordinary tensors, and forget the owners.

        Parameters get the gradients that were brought. Reading a parameter whose memory is still
        free is an error from then on.
        """
        parameters, owned = self._tensors[RemoteKind.PARAMETER], set(self._owned())
        for remote in owned:
            make_plain(remote.value)
        # (the user's code may keep views, which must not ask workers that have ended)
        for view in all_proxies():
            if source_of(view) in owned:
                make_plain(view)
        for name, remote in parameters.items():
            if is_vacant(remote.value):
                give_up(remote.value, name)
        for name, gradient in self._brought.items():
            parameter = parameters[name].value
            if not is_unread(parameter):
                gradient = value_of(gradient).to(parameter.device)
            parameter.grad = gradient
        self._brought = {}
        for table in (self._touched, self._here_too, self._places, self.gradients):
            table.clear()
        for tensors in self._tensors.values():
            tensors.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, proxies are ordinary tensors, for code of this package that looks at a network.

        Their values are those that are here, possibly stale or without memory. Changes are sent
        before.
        """
        self.flush()
        for remote in self._owned():
            make_plain(remote.value)
        try:
            yield
        finally:
            for place, key, known in self._places.values():
                # (`adopt_replaced` handles those that are others now)
                if place.get(key) is known.value:
                    make_proxy_again(known.value, known)

    @contextmanager
    def showing(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, parameters and buffers of workers are ordinary tensors with given values.

        Args:
            values: the values by name; an unread one makes an unread tensor of the parameter.
        """
        with self.suspended(), torch.no_grad(), ExitStack() as stack:
            found = [remote for remote in self._owned() if remote.name in values]
            in_memory = [remote for remote in found if not is_unread(values[remote.name])]
            before = [(remote.value, remote.value.data) for remote in in_memory]
            for remote in found:
                if remote in in_memory:
                    remote.value.data = values[remote.name]
                elif not is_deferred(remote.value):  # (a tied one has been handled by another name)
                    stack.enter_context(left_unread(remote.value, remote.name, values[remote.name]))
            try:
                yield
            finally:
                for tensor, data in reversed(before):  # (reversed, since a tied one is there twice)
                    tensor.data = data

    # -- for an optimizer that steps as a whole

    @contextmanager
    def at_hand(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, parameters of workers and their gradients are ordinary tensors on this rank.

        Afterwards all of these parameters are sent back (a change through ``data`` could not be
        noticed), and the gradients whose version has changed.

        Args:
            names: names of the parameters in the LightningModule.
        """
        self.flush()
        parameters = [self._tensors[RemoteKind.PARAMETER][name] for name in names]
        with torch.no_grad(), as_they_are():
            self._fetch(parameters)
            present, gradients = self.gradients.ask_present(), self._tensors[RemoteKind.GRADIENT]
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
        """End :meth:`at_hand` for a parameter: make it a proxy, and note what is to be sent.

        Args:
            remote: the parameter.
            held: the gradient that it had at the beginning; ``None``: it had none.
        """
        gradient, remote.value.grad = remote.value.grad, None
        make_proxy(remote.value, remote)
        self.touch(remote)
        if gradient is not (held and held.value):
            self.gradients.assigned[remote.name] = gradient
        elif held is not None and held.changed:
            self.touch(held)

    # -- around commands to the owners

    def outdate(self, *kinds: RemoteKind) -> None:
        """Note that the owners change tensors of these kinds, so that their values here are stale.

        Called before a command that has them change is sent. No kind: nothing is noted.
        """
        for kind in kinds:
            self._age[kind] += 1
            # (so that the next read fetches one tensor alone, see `read`)
            self._reads[kind] = 0
            if kind is RemoteKind.GRADIENT:
                self.gradients.outdate()
            elif kind is RemoteKind.PARAMETER and self._here:
                self._free_chosen()

    def flush(self) -> None:
        """Send the owners what was changed here; called before a command is sent.

        That is: values that were written to proxies, gradients that were assigned, and gradients
        that autograd has left here.

        Raises:
            HybridError: a view of an outdated value was changed.
        """
        in_graph, assigned = self.gradients.in_graph, self.gradients.assigned
        if self._busy or self._at_hand or not (self._touched or in_graph or assigned):
            return
        # (sending reads proxies, which would flush again)
        self._busy = True
        try:
            with as_they_are():
                if in_graph and self.gradients.send_arisen():
                    self.outdate(RemoteKind.GRADIENT)
                if assigned:
                    # (changes of the gradients of before are not sent)
                    for name in self.gradients.send_assigned():
                        self._touched.pop((RemoteKind.GRADIENT, name), None)
                    self.outdate(RemoteKind.GRADIENT)
                self._send_changed()
        finally:
            self._busy = False

    def adopt_fetched(self, names: Collection[str] | None = None) -> None:
        """Note that parameters and buffers that have memory here are equal to the owners'.

        Args:
            names: their names; ``None``: all of them.
        """
        for remote in self._owned():
            if (names is None or remote.name in names) and not is_vacant(remote.value):
                remote.seen = self._age[remote.kind]
                remote.note_equal()
        self._writes += 1

    def adopt(self, names: Iterable[str]) -> None:
        """Note that the values of these parameters here are equal to the owners'.

        Args:
            names: their names in the LightningModule.
        """
        for name in names:
            remote = self._tensors[RemoteKind.PARAMETER][name]
            remote.seen = self._age[RemoteKind.PARAMETER]
            remote.note_equal()

    def leave_gradients(self, values: Mapping[str, Tensor]) -> None:
        """Take over gradients at the end of a run; :meth:`close` puts them on the parameters.

        Args:
            values: the gradients by name of the parameter, in memory of this rank.
        """
        parameters = self._tensors[RemoteKind.PARAMETER]
        self._brought = {name: value for name, value in values.items() if name in parameters}
        self._keep_shown()
        self._owners.clear_gradients([*self._brought])  # (they belong to this rank now)

    def _keep_shown(self) -> None:
        """Copy brought gradients into the gradient tensors that the user's code refers to already.

        These are no longer linked to the owners then.
        """
        with torch.no_grad(), as_they_are():
            for remote in self.gradients.kept(self._brought):
                if self._brought[remote.name].layout is torch.strided:
                    value = value_of(self._brought[remote.name])
                    self._brought[remote.name] = remote.value.copy_(value)
                remote.keep()

    def adopt_replaced(self, *, computes: bool = True) -> None:
        """Find buffers that code here has replaced by other tensors, and make proxies of these.

        Their values are sent to the owners before the next command.

        Args:
            computes: whether stages are about to compute with what their ranks own. (After the
                training a hook may replace, or remove, what it likes.)

        Raises:
            HybridError: stages compute, and a parameter was replaced.
        """
        for name, (place, key, known) in self._places.items():
            value = place.get(key)
            if value is known.value:
                continue
            if known.kind is RemoteKind.PARAMETER or not isinstance(value, Tensor):
                if not computes:
                    continue
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
            self.touch(self._open(name, place, key))

    # -- for proxies, as the user's code uses them

    def read(self, remote: Remote) -> None:
        """Fetch a tensor from its owner if its values here are stale.

        At the second fetch since the owners have changed tensors of its kind, all others of the
        kind that are stale are fetched with it.
        """
        kind, age = remote.kind, self._age[remote.kind]
        # (the reader may keep a view and change it later, so `flush` compares the versions)
        self._touched[kind, remote.name] = remote
        if remote.name in self._here_too and kind is RemoteKind.BUFFER:
            remote.seen = age
        if remote.seen == age:
            return
        with outside_of_transforms():
            self.flush()
            # (one alone the first time: reading a single weight must not fetch a whole network)
            wanted = [remote]
            if self._reads[kind] and self._lone is None:
                wanted = [r for r in self._tensors[kind].values() if r.seen != age]
                if kind is RemoteKind.GRADIENT:
                    wanted = [r for r in wanted if r is remote or r.name in self.gradients.known]
            self._reads[kind] += 1
            with torch.no_grad():
                self._fetch(wanted)

    def bring(self, prefix: str = "", *, parameters: bool = True) -> None:
        """Fetch the parameters and buffers of a module that are stale here, in one go.

        Args:
            prefix: the beginning of their names: the module's name and a dot; empty: all.
            parameters: whether parameters are fetched too, or buffers alone.
        """
        self.flush()
        with torch.no_grad(), as_they_are():
            for kind in _IN_MODULES if parameters else [RemoteKind.BUFFER]:
                named = self._tensors[kind].items()
                self._fetch([r for name, r in named if name.startswith(prefix)])

    def absent_bytes(self, prefix: str) -> int:
        """Bytes of the parameters of a module that have no memory here.

        Args:
            prefix: the beginning of their names: the module's name and a dot; empty: all.
        """
        named = self._tensors[RemoteKind.PARAMETER].items()
        values = [remote.value for name, remote in named if name.startswith(prefix)]
        return sum(value.nbytes for value in values if is_vacant(value))

    def state(self, kind: RemoteKind) -> object:
        """Return a value to compare with a later one: equal if no tensor of a kind has changed.

        Changes by the owners count, and changes by this rank that were sent.
        """
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
        """Note that stages of this rank compute with these parameters in autograd's graph."""
        for name in names:
            self.enter_graph(self._tensors[RemoteKind.PARAMETER][name])

    def gradient(self, remote: Remote) -> Tensor | None:
        """Return what ``parameter.grad`` is: a proxy, an assigned tensor, or None for no gradient.

        It asks the owners if it is not known here whether there is a gradient.
        """
        if not self.gradients.is_known(remote):
            self.flush()  # (a gradient may have come about here)
        return self.gradients.proxy(remote)

    def assign_gradient(self, remote: Remote, value: Tensor | None) -> None:
        """Carry out ``parameter.grad = value``; the owner gets it before the next command.

        Args:
            remote: the parameter.
            value: the gradient; ``None``: it is cleared.
        """
        if self.gradients.has(remote, value):
            return  # (as in `parameter.grad *= 2`, which has written to the proxy already)
        self.release_gradients([remote.name])
        self.gradients.assign(remote, value)

    def release_gradients(self, names: Iterable[str]) -> None:
        """Drop gradients here, before their owners clear them.

        Gradients that the user's code still refers to get their present values, and keep them.

        Args:
            names: names of the parameters.
        """
        # (as in nearly every step: no list of all names is made)
        if self.gradients.none_here and not self._touched:
            return
        names = list(names)
        if self.gradients.kept(names):
            self.flush()
            with torch.no_grad(), as_they_are():
                self._fetch(self.gradients.kept(names))
        for name in names:
            self.gradients.release(name)
            self._touched.pop((RemoteKind.GRADIENT, name), None)

    # -- inside

    def _fetch(self, wanted: Iterable[Remote]) -> None:
        """Fetch those of some tensors that are stale here.

        Args:
            wanted: the tensors, all of one kind.

        Raises:
            HybridError: a gradient is sparse, and the memory for it here is dense.
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
            # (only if it has changed: autograd may have saved it, and refuses tensors that were
            # written to since)
            value = values[remote.name]
            if remote.name in empty or not same_numbers(remote.value, value.to(self.device)):
                remote.value.copy_(value)
        for remote in stale:
            remote.seen = self._age[kind]
            remote.note_equal()
        for other in self._tensors[kind].values():
            if id(other.value) in fetched:  # (the same tensor, tied under another name)
                other.seen = self._age[kind]
                other.note_equal()

    def _make_room(self, remote: Remote) -> bool:
        """Make sure that a tensor has memory on this device. Returns whether it had none at all."""
        if is_vacant(remote.value):
            occupy(remote.value, self.device)
            (self._here if self._lone is None else self._lone).append(remote)
            return True
        if remote.value.device != self.device:
            remote.value.data = remote.value.data.to(self.device)
        return False

    def _bring(self, kind: RemoteKind, stale: Iterable[Remote]) -> Collection[str]:
        """Have the owners write tensors into their memory on this rank, from device to device.

        Args:
            kind: the kind of the tensors; for buffers nothing is done.
            stale: the tensors, which have memory here.

        Returns:
            The names of the tensors that were written; the others are still stale.
        """
        if kind is RemoteKind.BUFFER:  # their sizes may change
            return ()
        # (the owners write without comparing: a tensor in autograd's graph must not be written to
        # if its numbers are the same, since a backward would be refused)
        saved = self.gradients.in_graph if kind is RemoteKind.PARAMETER else {}
        memory = {r.name: r.value for r in stale if r.name not in saved}
        brought = self._owners.bring(kind, memory)
        for value in map(memory.__getitem__, brought):
            # (an inference tensor counts nothing; what is frozen no step changes)
            if not value.is_inference() and (kind is RemoteKind.GRADIENT or value.requires_grad):
                increment_version(value)
        return brought

    def _send_changed(self) -> None:
        """Send the owners the tensors that were written to here.

        Raises:
            HybridError: a view of a stale value was changed.
        """
        changed: dict[RemoteKind, dict[str, Tensor]] = {}
        for (kind, name), remote in self._touched.items():
            if remote.changed:
                if remote.seen != self._age[kind] and not remote.written:
                    raise HybridError(
                        f"A view of {kind.value} {name!r}, which another rank owns, was changed "
                        "after that rank had updated it. Take the view anew from the "
                        f"{kind.value}, or change the {kind.value} itself."
                    )
                changed.setdefault(kind, {})[name] = remote.value
                remote.note_equal()
        for kind, values in changed.items():
            self._owners.take(kind, values)
            self._writes += 1
            self.changed |= kind is not RemoteKind.GRADIENT
