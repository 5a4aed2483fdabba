"""One tensor of another rank: its kind, and the source of its proxies, which asks its owner."""

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import version


class Kind(Enum):
    """What a tensor of another rank is to the LightningModule."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"


class RemoteStore(Protocol):
    """The ranks that own the tensors; names are those of the LightningModule."""

    def give(self, kind: Kind, names: list[str]) -> Mapping[str, Tensor]:
        """What these tensors are now."""

    def bring(self, kind: Kind, memory: Mapping[str, Tensor]) -> Collection[str]:
        """Write the present values of parameters or gradients into memory on this device.

        Returns:
            The names of those that have come; :meth:`give` fetches the others.
        """

    def take(self, kind: Kind, values: Mapping[str, Tensor], *, add: bool = False) -> None:
        """Set them, or add to them."""

    def clear_gradients(self, names: list[str]) -> None:
        """``parameter.grad = None``."""

    def gradient_names(self) -> set[str]:
        """Of the parameters that have a gradient."""


class Table(Protocol):
    """The remote tensors of one driver, who know what is here and how old it is.

    Attributes:
        device: where they are to the user's code; their memory comes there when it is read.
    """

    device: torch.device

    def read(self, remote: "Remote") -> None:
        """Fetch what the owner has, unless that is here already."""

    def touch(self, remote: "Remote") -> None:
        """Note that a remote tensor was written to here."""

    def enter_graph(self, remote: "Remote") -> None:
        """It takes part in a computation that autograd records."""

    def gradient(self, remote: "Remote") -> Tensor | None:
        """A proxy on the gradient of a parameter, if it has one."""

    def assign_gradient(self, remote: "Remote", value: Tensor | None) -> None:
        """``parameter.grad = value``."""


class Remote:
    """One tensor of another rank, and what this rank knows of it.

    Attributes:
        value: the memory that proxies show here; a parameter or buffer itself.
        seen: the age (:class:`~lightning_hybrid.remote.remote.RemoteTensors`) in which ``value``
            was fetched; ``None``: never.
        version: of ``value`` when it was last equal to the owner's.
        written: changed by an operation that the version of ``value`` does not count.
    """

    __slots__ = ("_shown", "kind", "name", "seen", "table", "value", "version", "written")

    def __init__(self, table: Table, kind: Kind, name: str, value: Tensor) -> None:
        self._shown: ref[Tensor] | None = None
        self.table, self.kind, self.name, self.value = table, kind, name, value
        self.seen: int | None = None
        # what is written here before the first fetch is overwritten by it, and not sent
        self.version = version(value)
        self.written = False

    def show(self, make: Callable[[], Tensor]) -> Tensor:
        """The one proxy that code here has, made if there is none."""
        proxy = self.shown
        if proxy is None:
            proxy = make()
            self._shown = ref(proxy)
        return proxy

    @property
    def shown(self) -> Tensor | None:
        """That proxy, as long as any code here has it."""
        return self._shown() if self._shown is not None else None

    def keep(self) -> None:
        """The owner has it no more: proxies hold from now on what ``value`` holds."""
        self.table = _Kept(self.value.device)

    @property
    def changed(self) -> bool:
        return self.written or (self.seen is not None and version(self.value) != self.version)

    def settle(self) -> None:
        """``value`` is what the owner has."""
        self.version, self.written = version(self.value), False


class _Kept:
    """The table of what no other rank has any more: all of it is here, and nobody is told."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self, remote: Remote, _: Tensor | None = None) -> None:
        """Nobody is asked."""

    touch = enter_graph = gradient = assign_gradient = read
