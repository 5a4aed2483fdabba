"""Groups of NCCL between processes with emulated devices: its rules, over gloo.

What is not kept to: a `wait` blocks the host here, where NCCL has the device wait. With
``CUDA_LAUNCH_BLOCKING=1`` each operation does from its beginning on, as there.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from nccl_rules import check
from torch import Tensor

CUDA = torch.device("cuda")


class _Work:
    """A transfer, with the tensors that it needs up to its end."""

    def __init__(self, work: dist.Work, *kept: Any) -> None:
        self._work, self._kept = work, kept
        self._over = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1" and work.wait()

    def wait(self, *arguments: Any) -> bool:
        # (gloo would wait for another end)
        return self._over or self._work.wait(*arguments)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()


class EmulatedNCCL:
    """Stands for `torch.distributed.ProcessGroupNCCL`.

    Args:
        store: of the ranks.
        rank: of this process.
        size: number of the ranks.
        options: its `_timeout` counts.
    """

    Options = staticmethod(lambda: SimpleNamespace(_timeout=timedelta(minutes=10)))

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._store, self._rank, self._size = store, rank, size
        self._timeout, self._met = options._timeout, False
        self._use = ""
        self._lock = threading.Lock()

    def name(self) -> str:
        return "nccl"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        return self._one_way("send", tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        return self._one_way("recv", tensors, peer)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> _Work:
        return self._together(self._gloo.allreduce, tensors, *options)

    def broadcast(self, tensors: list[Tensor], *options: Any) -> _Work:
        return self._together(self._gloo.broadcast, tensors, *options)

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> _Work:
        into = self._memory("collectives", gathered[0])
        return self._together(lambda mine: self._gloo.allgather([into], mine), tensors)

    def barrier(self, *options: Any) -> _Work:
        return _Work(self._gloo.barrier())

    def shutdown(self) -> None:
        self._gloo.shutdown()
        self._gloo = None

    abort = shutdown

    def _one_way(self, name: str, tensors: list[Tensor], peer: int) -> _Work:
        memory = self._memory(name, tensors)
        return _Work(getattr(self._gloo, name)(memory, peer, 0), tensors, memory)

    def _together(self, call: Callable[..., Any], tensors: list[Tensor], *options: Any) -> _Work:
        memory = self._memory("collectives", tensors)
        return _Work(call(memory, *options), tensors, memory)

    def _memory(self, use: str, tensors: list[Tensor]) -> list[Tensor]:
        """As gloo takes it, if NCCL would."""
        for tensor in tensors:
            check(tensor, CUDA, collective=use == "collectives")
            assert tensor.device.index == torch.cuda.current_device(), f"on {tensor.device}"
        assert self._use in ("", use), f"one communicator is there to {self._use} and to {use}"
        self._use = use
        self._meet()
        return [_on_the_host(tensor) for tensor in tensors]

    def _meet(self) -> None:
        """The first use makes the communicator: there each rank waits for all others."""
        with self._lock:
            if self._met:
                return
            self._store.set(f"met{self._rank}", "")
            self._store.wait([f"met{rank}" for rank in range(self._size)], self._timeout)
            self._met = True


def _on_the_host(tensor: Tensor) -> Tensor:
    """A tensor of the CPU with the same memory."""
    count = tensor.numel() * tensor.element_size()
    if not count or tensor.device.type == "cpu":
        return tensor.cpu()
    memory = (ctypes.c_uint8 * count).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def emulate() -> None:
    """Give this process `torch.distributed.ProcessGroupNCCL`."""
    dist.ProcessGroupNCCL = EmulatedNCCL
    made: Any = dist.init_process_group

    def init(backend: str, *arguments: Any, device_id: Any = None, **options: Any) -> None:
        made("gloo" if backend == "nccl" else backend, *arguments, **options)

    dist.init_process_group = init
    for name in ("all_reduce", "broadcast"):  # what Lightning calls for the default group
        setattr(dist, name, _taking_devices(getattr(dist, name)))
    gather: Any = dist.all_gather

    def gathering(gathered: list[Tensor], tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        into = [_on_the_host(each) for each in gathered]
        return gather(into, _on_the_host(tensor), *arguments, **options)

    dist.all_gather = gathering


def _taking_devices(collective: Any) -> Any:
    def taking(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        return collective(_on_the_host(tensor), *arguments, **options)

    return taking
