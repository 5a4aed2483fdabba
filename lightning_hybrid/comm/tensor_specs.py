"""What a receiver must know before tensors come: of each tensor, and of a call of the network."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, type and order in memory of a tensor.

    What computes with a tensor may depend on the order of its numbers in memory: ``view`` and
    ``as_strided`` do, and convolutions choose by it how they compute. So it travels in the order
    that it has, but without what lies between its numbers.

    Attributes:
        shape: sizes.
        dtype: element type.
        requires_grad: whether the sender wants its gradient back.
        strides: of a tensor whose numbers fill its memory; ``None``: those of a contiguous one.
        on_cpu: whether it is on the CPU, where it stays whatever the device of the stages is: a
            state of a generator, sequence lengths, a Python number.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    strides: tuple[int, ...] | None = None
    on_cpu: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, gradient: bool = True) -> "TensorSpec":
        """That of ``tensor``.

        Args:
            tensor: what is to travel.
            gradient: whether its gradient may be wanted.
        """
        strides = (
            None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        )
        wants = gradient and tensor.requires_grad
        on_cpu = tensor.device.type == "cpu"
        return cls(tuple(tensor.shape), tensor.dtype, wants, strides, on_cpu)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this spec, uninitialised; on ``device``, unless it stays on the CPU."""
        device = torch.device("cpu") if self.on_cpu else device
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        """A tensor of this spec, of zeros."""
        return self.empty(device).zero_()

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same numbers in this order in memory: ``tensor`` itself, or a copy."""
        # a conjugate or a negative may be a note on the numbers of another tensor
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if self.strides is None:
            return tensor.contiguous()
        if tensor.stride() == self.strides:
            return tensor
        return self.empty(tensor.device).copy_(tensor)


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor that is laid out by a spec, byte by byte.

    So it travels over any backend: NCCL refuses 16-bit integers and complex numbers.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


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
        # autocast has a switch for each kind of device
        kind = device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return cls(kind, dtype, enabled, torch.get_default_dtype())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, this process computes with this precision."""
        before = torch.get_default_dtype()
        # torch keeps it for the process and has no context for it
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
            :class:`~lightning_hybrid.graph.NetworkGraph`).
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
