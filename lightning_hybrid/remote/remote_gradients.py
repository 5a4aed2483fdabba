"""The gradients of parameters that other ranks own, as the user's code on the driver sees them.

They are in three places: where the owners have them; here, where the user has assigned one
(``parameter.grad = value``); and here too, where the user's own code has computed with a parameter
(a penalty over all weights), so that autograd leaves a gradient on the driver, which is part of
the owner's.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import as_they_are, is_shared, storage_key
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.remote.proxy import make_proxy, source_of
from lightning_hybrid.remote.remote_source import Kind, Remote, RemoteStore, Table


class RemoteGradients:
    """The gradients of the remote parameters of one driver.

    Args:
        table: of all remote tensors.
        owners: of the parameters.
        parameters: by name.
        held: by name, the gradients that there is memory for here.

    Attributes:
        in_graph: the parameters that have entered the graph of this step, by name.
        assigned: by name of the parameter, gradients that the owners have not been told of yet.
    """

    def __init__(
        self,
        table: Table,
        owners: RemoteStore,
        parameters: dict[str, Remote],
        held: dict[str, Remote],
    ) -> None:
        self._table, self._owners = table, owners
        self._parameters, self._held = parameters, held
        self._present: set[str] | None = None
        self._parts: dict[str, Tensor] = {}  # what was assigned, of larger tensors
        self.in_graph: dict[str, Remote] = {}
        self.assigned: dict[str, Tensor | None] = {}

    @property
    def pending(self) -> bool:
        """Whether there may be something here that the owners lack."""
        return bool(self.assigned or self.in_graph)

    @property
    def known(self) -> Collection[str]:
        """Names of the parameters that have a gradient, as far as the owners were asked."""
        return self._present or ()

    def is_settled(self, remote: Remote) -> bool:
        """Whether what a parameter's gradient is does not depend on what is pending."""
        if remote.name in self.assigned:
            return True
        return not self.in_graph and self._present is not None

    def names(self) -> set[str]:
        """Names of the parameters whose owners have a gradient; there is memory for it here."""
        if self._present is None:
            self._present = self._owners.gradient_names()
        if not self._present <= self._held.keys():
            with torch.inference_mode(False), as_they_are():
                for name in self._present - self._held.keys():  # a second read fetches all
                    parameter = self._parameters[name].value
                    memory = torch.zeros_like(parameter, device=self._table.device)
                    self._held[name] = Remote(self._table, Kind.GRADIENT, name, memory.detach())
        return self._present

    def proxy(self, remote: Remote) -> Tensor | None:
        """What ``parameter.grad`` is: what was assigned, a proxy on the owner's, or nothing."""
        if remote.name in self.assigned:
            return self.assigned[remote.name]
        if remote.name not in self.names():
            return None
        found = self._held[remote.name]
        return found.show(lambda: make_proxy(found.value.detach(), found))

    def has(self, remote: Remote, value: Tensor | None) -> bool:
        """Whether this is the gradient of the parameter: a proxy on it."""
        found = self._held.get(remote.name)
        return found is not None and source_of(value) is found

    def assign(self, remote: Remote, value: Tensor | None) -> None:
        """``parameter.grad = value``."""
        other = source_of(value)
        if other is not None:
            # what a proxy shows now is assigned: its owner may have another number by the flush
            other.table.read(other)
        with as_they_are():
            remote.value.grad = value  # torch's own check of shape, dtype and device
            # (one that stays here would be added to the owner's, as if it had arisen)
            remote.value.grad = None
        self.assigned[remote.name] = value

    def send_arisen(self) -> bool:
        """Add to the owners' what the user's own use of parameters has left here, if anything."""
        found = {}
        for name, remote in self.in_graph.items():
            if remote.value.grad is not None:
                found[name], remote.value.grad = remote.value.grad, None
        if found:
            self._owners.take(Kind.GRADIENT, found, add=True)
            self._note_parts(found)
        return bool(found)

    def send_assigned(self) -> Collection[str]:
        """Bring the owners what was assigned. Returns the names of the parameters."""
        assigned, self.assigned = self.assigned, {}
        cleared = [name for name, value in assigned.items() if value is None]
        if cleared:
            self._owners.clear_gradients(cleared)
        values = {name: value for name, value in assigned.items() if value is not None}
        if values:
            self._owners.take(Kind.GRADIENT, values)
        for name in assigned:
            self.release(name)
        self._note_parts(values)
        return assigned.keys()

    def refuse_parts(self) -> None:
        """A backward adds to gradients: not in memory of a larger tensor that code has still.

        Raises:
            NetworkError: that tensor would not have the sum.
        """
        keys = {name: storage_key(part.untyped_storage()) for name, part in self._parts.items()}
        counts = Counter(keys.values())
        for name, gradient in self._parts.items():
            if is_shared(gradient, besides=counts[keys[name]] - 1):
                raise NetworkError(
                    f"The gradient of {name!r} was made a part of a larger tensor, and a backward "
                    "adds to it. Another rank owns it, so the larger tensor would not change. Give "
                    "the parameter a gradient of its own memory (`parameter.grad = part.clone()`), "
                    "or clear it before the backward (`optimizer.zero_grad()`)."
                )

    def _note_parts(self, gradients: Mapping[str, Tensor]) -> None:
        for name, value in gradients.items():
            if value.layout is torch.strided and value.nbytes < value.untyped_storage().nbytes():
                self._parts[name] = value

    def kept(self, names: Iterable[str]) -> list[Remote]:
        """Those of these gradients that code here has a proxy of at this moment."""
        held = (self._held[name] for name in names if name in self._held)
        return [found for found in held if found.shown is not None]

    def release(self, name: str) -> None:
        """A parameter has another gradient, or none: who has kept the old one keeps it."""
        self._parts.pop(name, None)
        found = self._held.pop(name, None)
        if found is not None:
            found.keep()

    def outdate(self) -> None:
        """The owners change their gradients."""
        self._present = None

    def clear(self) -> None:
        """Nothing is in the graph, and nothing assigned; nobody is asked any more."""
        self.in_graph.clear()
        self.assigned.clear()
        self._parts.clear()
        self._present = set()
