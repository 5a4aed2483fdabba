"""What a receiver must know of a tensor before it comes."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor.

    Attributes:
        shape: sizes.
        dtype: element type.
        requires_grad: whether the sender wants its gradient back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """That of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this spec, uninitialised."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        """A tensor of this spec, of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)
