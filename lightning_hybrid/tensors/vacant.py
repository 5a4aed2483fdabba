"""Parameters that have given their memory back while another rank trains them.

A vacant one is the object that it was, with its size and type, and an empty storage. Nothing may
compute with it: many operations on CPUs would read at address 0. So it is a proxy to the user's
code, which fetches the numbers first, or on a rank where no code of the user's runs.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import as_they_are, is_held, is_shared
from lightning_hybrid.tensors.deferred import is_deferred, offload


def is_vacant(tensor: Any) -> bool:
    """Whether a tensor has given its memory back."""
    with as_they_are():
        if is_deferred(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            return False
        return bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def vacate(tensor: Tensor) -> None:
    """Give a tensor's memory back, unless something else shows it, or a graph refers to it.

    What is not contiguous keeps it: TorchDynamo cannot look at such a tensor without memory.
    """
    with torch.no_grad(), as_they_are():
        if is_deferred(tensor) or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return
        if is_vacant(tensor) or is_shared(tensor) or is_held(tensor) or tensor.is_inference():
            return
        empty = torch.empty_like(tensor)
        empty.untyped_storage().resize_(0)
        tensor.data = empty


def occupy(tensor: Tensor, device: torch.device | None = None) -> None:
    """Give a vacant tensor memory again, with no numbers in it.

    Args:
        tensor: a tensor.
        device: where; ``None``: where it was.
    """
    if is_vacant(tensor):
        with torch.no_grad(), as_they_are():
            contiguous = torch.contiguous_format
            tensor.data = torch.empty_like(tensor, device=device, memory_format=contiguous)


def give_up(tensor: Tensor, name: str) -> None:
    """Nobody will bring the numbers of a vacant tensor: from now on reading it is an error."""
    if is_vacant(tensor):
        offload(tensor, name, "not here: its rank has failed, or could not hand it over")
