"""What all ranks of a replica must know of a call of the network before it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_hybrid.comm.tensor_specs import TensorSpec


@dataclass(frozen=True)
class Precision:
    """The precision that surrounds a call or a step on the driver, for the other ranks.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        autocast_dtype: what autocast would use.
        autocast: whether it is enabled.
        default_dtype: of new tensors (``precision="16-true"`` changes it).
    """

    device_type: str
    autocast_dtype: torch.dtype
    autocast: bool
    default_dtype: torch.dtype

    @classmethod
    def current(cls, device: torch.device) -> "Precision":
        """The precision that this process computes with now."""
        kind = device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return cls(kind, dtype, enabled, torch.get_default_dtype())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, this process computes with this precision."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            with torch.autocast(self.device_type, self.autocast_dtype, enabled=self.autocast):
                yield
        finally:
            torch.set_default_dtype(before)


@dataclass(frozen=True)
class CallKey:
    """All that decides what travels in a call: calls with equal keys exchange no shapes.

    Attributes:
        specialization: number of the captured graph. Where a value that the network's Python
            looks at has changed, there is a graph of its own, cut at the same places.
        inputs: per micro-batch, what enters stage 0.
        numbers: per micro-batch, what the graph's numbers are (see
            :class:`~lightning_hybrid.network.NetworkGraph`).
        grad: whether the call is differentiable.
        training: whether the network is in training.
        trainable: ``requires_grad`` of every parameter of the network, in its order.
        precision: what surrounds the call.
        continues: its random numbers follow those of the code around it: the states of the
            generators are the last inputs, and there is one micro-batch.
    """

    specialization: int
    inputs: tuple[tuple[TensorSpec, ...], ...]
    numbers: tuple[tuple[int | float, ...], ...]
    grad: bool
    training: bool
    trainable: tuple[bool, ...]
    precision: Precision
    continues: bool = False

    @property
    def microbatches(self) -> int:
        return len(self.inputs)
