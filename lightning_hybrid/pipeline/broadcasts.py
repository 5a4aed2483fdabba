"""Tensors of one rank of a group on all of its ranks: small ones together, large ones as they are.

They travel as bytes, since NCCL takes neither every type nor every order in memory.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid._torch.tensors import copy_each
from lightning_hybrid.comm import ANOTHER_REPLICA, Group, bytes_of, start, wait

MESSAGE_BYTES = 25 * 2**20
"""The most that small tensors fill together."""
_LARGE_BYTES = 2**20
"""From here on a tensor travels by itself, from the memory that it has."""


class Broadcasts:
    """Broadcasts in one group, through a buffer that is kept from one to the next.

    Args:
        group: of the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def send(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Give every rank the numbers that one has.

        Autograd does not hear of it.

        Args:
            tensors: dense ones on the device of the group, on all ranks of the same sizes and types
                and in the same order.
            source: index of the rank that has the numbers.
        """
        waiting, nbytes = list[Tensor](), 0
        # those of large numbers first, so that all lie at multiples of their size
        for tensor in sorted(tensors, key=lambda tensor: -tensor.itemsize):
            if tensor.nbytes >= _LARGE_BYTES:
                self._send_large(tensor.data, source)
                continue
            if nbytes + tensor.nbytes > MESSAGE_BYTES:
                self._send_together(waiting, nbytes, source)
                waiting, nbytes = [], 0
            waiting.append(tensor.data)
            nbytes += tensor.nbytes
        if nbytes:
            self._send_together(waiting, nbytes, source)

    def _send_large(self, tensor: Tensor, source: int) -> None:
        laid_out = tensor.contiguous()
        self._broadcast(bytes_of(laid_out), source)
        if laid_out is not tensor:
            tensor.copy_(laid_out)

    def _send_together(self, tensors: list[Tensor], nbytes: int, source: int) -> None:
        device = tensors[0].device
        if self._buffer.numel() < nbytes or self._buffer.device != device:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        flat = self._buffer[:nbytes]
        parts = [
            part.view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]))
        ]
        here = self._group.rank() == source
        if here:
            copy_each(parts, tensors)
        self._broadcast(flat, source)
        if not here:
            copy_each(tensors, parts)

    def _broadcast(self, memory: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        wait(start(self._group.broadcast, [memory], options, peer=ANOTHER_REPLICA), ANOTHER_REPLICA)
