"""Autocast and default type of a call, which workers take from the driver."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CallPrecision:
    """Autocast and default type of a call or step on the driver; workers compute with the same.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        autocast_dtype: type that autocast uses when it is enabled.
        autocast: whether autocast is enabled.
        default_dtype: default type of new tensors (``precision="16-true"`` changes it).
    """

    device_type: str
    autocast_dtype: torch.dtype
    autocast: bool
    default_dtype: torch.dtype

    @classmethod
    def current(cls, device: torch.device) -> "CallPrecision":
        """Read the precision that this process computes with now, on this kind of device."""
        # autocast is enabled separately for each kind of device
        kind = device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return cls(kind, dtype, enabled, torch.get_default_dtype())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which this process computes with this precision."""
        before = torch.get_default_dtype()
        # torch has no context manager for the default type, which is one for the process
        torch.set_default_dtype(self.default_dtype)
        try:
            with torch.autocast(self.device_type, self.autocast_dtype, enabled=self.autocast):
                yield
        finally:
            torch.set_default_dtype(before)
