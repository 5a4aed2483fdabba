"""The source of a proxy: a tensor that another rank owns, and what this rank knows of it."""

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import version


class Kind(Enum):
    """Kinds of tensors that another rank owns."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"


class RemoteStore(Protocol):
    """Reads and sets tensors on the ranks that own them, by their names in the LightningModule."""

    def give(self, kind: Kind, names: list[str]) -> Mapping[str, Tensor]:
        """Fetch the present values of tensors."""

    def bring(self, kind: Kind, memory: Mapping[str, Tensor]) -> Collection[str]:
        """Write the present values of parameters or gradients into memory on this device.

        Returns:
            The names of those that have come; :meth:`give` fetches the others.
        """

    def take(self, kind: Kind, values: Mapping[str, Tensor], *, add: bool = False) -> None:
        """Set tensors to values, or, with ``add``, add to them."""

    def clear_gradients(self, names: list[str]) -> None:
        """Set the gradients of parameters to None."""

    def gradient_names(self) -> set[str]:
        """Names of the parameters that have a gradient."""


class Table(Protocol):
    """What proxies call when the user's code uses them.

    Attributes:
        device: the device that proxies seem to be on; their values are fetched to it.
    """

    device: torch.device

    def read(self, remote: "Remote") -> None:
        """Fetch a tensor from its owner if what is here is stale."""

    def touch(self, remote: "Remote") -> None:
        """Note that a remote tensor was written to here."""

    def enter_graph(self, remote: "Remote") -> None:
        """Note that a remote tensor takes part in a computation that autograd records."""

    def gradient(self, remote: "Remote") -> Tensor | None:
        """A proxy of the gradient of a parameter, if it has one."""

    def assign_gradient(self, remote: "Remote", value: Tensor | None) -> None:
        """Carry out ``parameter.grad = value``."""


class Remote:
    """A tensor that another rank owns, and what this rank knows of it.

    Attributes:
        table: what its proxies call.
        kind: its kind.
        name: name of the tensor, or of the parameter of a gradient, in the LightningModule.
        value: its values on this rank: the parameter or buffer itself, or memory for a gradient.
        seen: the age (:class:`~lightning_hybrid.remote.remote.RemoteTensors`) in which ``value``
            was fetched; ``None``: never.
        version: the version counter of ``value`` when it was last equal to the owner's.
        written: whether a proxy has noted a write to ``value`` since then.
    """

    __slots__ = ("_shown", "kind", "name", "seen", "table", "value", "version", "written")

    def __init__(self, table: Table, kind: Kind, name: str, value: Tensor) -> None:
        self._shown: ref[Tensor] | None = None
        self.table, self.kind, self.name, self.value = table, kind, name, value
        self.seen: int | None = None
        # (a write before the first fetch is overwritten by it, and not sent)
        self.version = version(value)
        self.written = False

    def show(self, make: Callable[[], Tensor]) -> Tensor:
        """The proxy of this gradient that code here has; if there is none, ``make`` makes one."""
        proxy = self.shown
        if proxy is None:
            proxy = make()
            self._shown = ref(proxy)
        return proxy

    @property
    def shown(self) -> Tensor | None:
        """The proxy that :meth:`show` has given, if any code here still refers to it."""
        return self._shown() if self._shown is not None else None

    def keep(self) -> None:
        """Let proxies keep the present values of ``value``, since the owner drops the tensor."""
        self.table = _Kept(self.value.device)

    @property
    def changed(self) -> bool:
        """Whether ``value`` was written to here since it was last equal to the owner's."""
        return self.written or (self.seen is not None and version(self.value) != self.version)

    def settle(self) -> None:
        """Note that ``value`` is equal to what the owner has."""
        self.version, self.written = version(self.value), False


class _Kept:
    """A table for tensors that no other rank has any more: nothing is fetched or sent."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self, remote: Remote, _: Tensor | None = None) -> None:
        """Do nothing."""

    touch = enter_graph = gradient = assign_gradient = read
