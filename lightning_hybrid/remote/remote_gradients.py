"""The gradients of parameters that other ranks own, for the user's code on the driver.

A gradient is in up to three places: on the owner; on the driver, if the user's code has assigned
one (``parameter.grad = value``); and on the driver too, if the user's code has computed with the
parameter (a penalty over all weights): autograd leaves a gradient there, to be added to the
owner's.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.remote.proxy import (
    Remote,
    RemoteKind,
    RemoteStore,
    UsesOfProxies,
    make_proxy,
    source_of,
)


class RemoteGradients:
    """The gradients of the remote parameters of one driver.

    Args:
        table: fetches and sends values for the proxies.
        owners: reads and sets gradients on the ranks that own the parameters.
        parameters: the parameters, by name.
        held: the gradients that have memory here, by name of the parameter.

    Attributes:
        in_graph: by name, the parameters that have entered autograd's graph in this step.
        assigned: by name of the parameter, assigned gradients that were not sent to the owners yet.
    """

    def __init__(
        self,
        table: UsesOfProxies,
        owners: RemoteStore,
        parameters: dict[str, Remote],
        held: dict[str, Remote],
    ) -> None:
        self._table = table
        self._owners = owners
        self._parameters = parameters
        self._held = held
        self._present: set[str] | None = None
        self._over = False
        self._parts = set[str]()  # names of assigned gradients that are parts of larger tensors
        self.in_graph: dict[str, Remote] = {}
        self.assigned: dict[str, Tensor | None] = {}

    @property
    def known(self) -> Collection[str]:
        """Names of the parameters that have a gradient on their owner, as far as it is known here.

        The owners are not asked: it is what they have told last, and empty if their gradients have
        changed since.
        """
        return self._present or ()

    def is_known(self, remote: Remote) -> bool:
        """Whether it is known here if a parameter has a gradient.

        Else pending changes must be sent (:meth:`Proxies.flush`), and the owners be asked.
        """
        if remote.name in self.assigned:
            return True
        return not self.in_graph and self._present is not None

    def ask_present(self) -> set[str]:
        """Return the names of the remote parameters that have a gradient on their owner.

        Asks the owners unless it is known (:attr:`known` never asks). Each new name also gets a
        `Remote` with zeroed memory on this rank, into which a later read fetches the gradient.
        """
        present = self._names() & self._parameters.keys()
        if not present <= self._held.keys():
            with torch.inference_mode(False), as_they_are():
                for name in present - self._held.keys():  # (a second read fetches them all)
                    parameter = self._parameters[name].value
                    memory = torch.zeros_like(parameter, device=self._table.device)
                    self._held[name] = Remote(
                        self._table, RemoteKind.GRADIENT, name, memory.detach()
                    )
        return present

    def _names(self) -> set[str]:
        if self._present is None:
            self._present = self._owners.gradient_names()
        return self._present

    def has_deferred(self, name: str) -> bool:
        """Whether a deferred parameter has a gradient on its owner.

        Asks the owners unless it is known. After the run, when they cannot be asked, it is True.
        """
        return self._over or name in self._names()

    def clear_deferred(self, name: str) -> None:
        """Clear the gradient of a deferred parameter on its owner; after the run, do nothing."""
        if not self._over:
            self._owners.clear_gradients([name])
            self._names().discard(name)

    def proxy(self, remote: Remote) -> Tensor | None:
        """Return what ``parameter.grad`` is: an assigned tensor, a proxy, or None for no gradient.

        A proxy is one of the owner's gradient. The owners are asked unless it is known which
        parameters have a gradient.
        """
        if remote.name in self.assigned:
            return self.assigned[remote.name]
        if remote.name not in self.ask_present():
            return None
        found = self._held[remote.name]
        return found.show(lambda: make_proxy(found.value.detach(), found))

    def has(self, remote: Remote, value: Tensor | None) -> bool:
        """Whether ``value`` is the proxy of the present gradient of the parameter ``remote``."""
        found = self._held.get(remote.name)
        return found is not None and source_of(value) is found

    def assign(self, remote: Remote, value: Tensor | None) -> None:
        """Carry out ``parameter.grad = value``; the owner gets it before the next command.

        Args:
            remote: the parameter.
            value: the gradient; ``None``: it is cleared.
        """
        other = source_of(value)
        if other is not None:
            # (the present values are assigned; before it is sent, the owner may change them)
            other.table.read(other)
        with as_they_are():
            remote.value.grad = value  # (torch checks shape, dtype and device)
            # (a gradient that is left here would be added to the owner's)
            remote.value.grad = None
        self.assigned[remote.name] = value

    def send_arisen(self) -> bool:
        """Send the owners the gradients that autograd has left on this rank, to be added to theirs.

        They come from the user's own use of parameters, as in a penalty, and are cleared here.

        Returns:
            Whether there were any such gradients.
        """
        found = {}
        for name, remote in self.in_graph.items():
            if remote.value.grad is not None:
                found[name], remote.value.grad = remote.value.grad, None
        if found:
            # (autograd makes parts of a larger tensor for `torch.cat`: nobody refers to that)
            self._owners.take(RemoteKind.GRADIENT, found, add=True)
        return bool(found)

    def send_assigned(self) -> Collection[str]:
        """Send the owners the gradients that code has assigned or cleared since the last call.

        Returns:
            The names of the parameters.
        """
        assigned, self.assigned = self.assigned, {}
        cleared = [name for name, value in assigned.items() if value is None]
        if cleared:
            self._owners.clear_gradients(cleared)
        values = {name: value for name, value in assigned.items() if value is not None}
        if values:
            self._owners.take(RemoteKind.GRADIENT, values)
        for name in assigned:
            self.release(name)
        self.note_parts(values)
        return assigned.keys()

    def refuse_parts(self) -> None:
        """Refuse a backward if a gradient was assigned that is a part of a larger tensor.

        The backward adds to the owner's gradient, so that the larger tensor, which the user's code
        may still refer to, would not have the sum.

        Raises:
            NetworkError: there is such a gradient.
        """
        for name in self._parts:
            raise NetworkError(
                f"The gradient of {name!r} was made a part of a larger tensor, and a backward adds "
                "to it. Another rank owns it, so the larger tensor would not change. Give the "
                "parameter a gradient of its own memory (`parameter.grad = part.clone()`), or "
                "clear it before the backward (`optimizer.zero_grad()`)."
            )

    def note_parts(self, gradients: Mapping[str, Tensor]) -> None:
        """Note which gradients are parts of larger tensors, for :meth:`refuse_parts`.

        Args:
            gradients: the gradients that code here has made or assigned, by name of the parameter.
        """
        for name, value in gradients.items():
            if value.layout is torch.strided and value.nbytes < value.untyped_storage().nbytes():
                self._parts.add(name)

    @property
    def none_here(self) -> bool:
        """Whether no gradient of a worker's parameter has memory here or was assigned here."""
        return not (self._held or self._parts or self.assigned)

    def kept(self, names: Iterable[str]) -> list[Remote]:
        """The gradients of some parameters of which code here has a proxy at this moment.

        Args:
            names: names of the parameters.
        """
        held = (self._held[name] for name in names if name in self._held)
        return [found for found in held if found.shown is not None]

    def release(self, name: str) -> None:
        """Drop the gradient of a parameter here; a proxy that code still has keeps its values.

        Nothing is sent to the owner.
        """
        self._parts.discard(name)
        found = self._held.pop(name, None)
        if found is not None:
            found.keep()

    def outdate(self) -> None:
        """Note that owners change which parameters have a gradient, so that they are asked anew."""
        self._present = None

    def clear(self) -> None:
        """Forget all gradients at the end of a run; the owners are asked no more."""
        self.in_graph.clear()
        self.assigned.clear()
        self._parts.clear()
        self._present = set()
        self._over = True
