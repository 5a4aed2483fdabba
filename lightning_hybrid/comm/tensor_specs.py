"""What a receiver must know of a tensor before it comes."""

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
