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
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    strides: tuple[int, ...] | None = None

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
        return cls(tuple(tensor.shape), tensor.dtype, gradient and tensor.requires_grad, strides)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this spec, uninitialised."""
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


def memory_of(tensor: Tensor) -> Tensor:
    """The numbers of a tensor that is laid out by a spec, in the order in which they lie."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
