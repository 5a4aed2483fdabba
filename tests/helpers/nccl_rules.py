"""NCCL's rules for the wires of tests: what a GPU's would refuse, or wait for, fails on CPUs too.

They are those of ``ProcessGroupNCCL`` (torch) and of NCCL's documentation:

* tensors are on the device, dense, contiguous, and of one of some types;
* one direction on a communicator: two wait for each other;
* the first operation makes the communicator, in which each end waits for the other one;
* a message is taken in its order, by a receive of its size, and can't be taken back: a transfer
  that is dropped takes place all the same;
* with ``CUDA_LAUNCH_BLOCKING=1`` an operation that begins is over, so that a send waits for its
  receive. So it is between the ranks of a replica here.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from in_memory import MemoryGroup, MemoryGroupOfRank, MemoryLines, MemoryReplica, MemoryWire
from torch import Tensor

from lightning_hybrid.comm import mesh
from lightning_hybrid.comm.connections import GroupHandle, Transfer, connection_lost
from lightning_hybrid.comm.replica_channels import EdgeWires

CPU = torch.device("cpu")
TYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}
"""What NCCL takes; collectives also take complex numbers, as pairs."""


def check(tensor: Tensor, device: torch.device, *, collective: bool = False) -> None:
    """Raise what ``ProcessGroupNCCL`` raises for a tensor, if it is not for it."""
    if tensor.device.type != device.type or tensor.layout is not torch.strided:
        raise ValueError("Tensors must be CUDA and dense")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if tensor.dtype not in TYPES and not (collective and tensor.is_complex()):
        raise TypeError(
            f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
        )


class _OneUse:
    """An end of a communicator, which is for one thing: to send, to receive, or for collectives."""

    def __init__(self, meet: Callable[[], None]) -> None:
        self._meet, self._use = meet, ""

    def begin(self, use: str) -> None:
        if not self._use:
            self._use = use
            self._meet()
        assert self._use == use, f"one communicator is there to {self._use} and to {use}"


# ---------------------------------------------------------------- in memory


class _Shared:
    """What both ends of a wire share: where they meet, and the sizes of its messages."""

    def __init__(self, timeout_s: float) -> None:
        self.lock, self._timeout_s = threading.Lock(), timeout_s
        self._sizes: tuple[deque[int], deque[int]] = (deque(), deque())
        self._barrier, self._reason = threading.Barrier(2), "Timed out waiting"

    def meet(self, peer: str) -> None:
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise connection_lost(peer, RuntimeError(self._reason)) from None

    def close(self) -> None:
        self._reason = "Connection closed by peer"
        self._barrier.abort()

    def note(self, tensor: Tensor, *, sends: bool) -> None:
        """The next message is of this size, says one end; what the other one says must agree."""
        with self.lock:
            mine, theirs = self._sizes if sends else self._sizes[::-1]
            if theirs:
                assert theirs.popleft() == tensor.nbytes, "sizes of a message differ"
            else:
                mine.append(tensor.nbytes)


class StrictWire:
    """An end of a wire in memory.

    Args:
        wire: what it is made of.
        shared: of both ends.
        device: where tensors must be.

    Attributes:
        blocking: whether a transfer that begins is over, as with ``CUDA_LAUNCH_BLOCKING=1``.
    """

    def __init__(self, wire: MemoryWire, shared: _Shared, device: torch.device) -> None:
        self.peer, self._wire, self._shared, self._device = wire.peer, wire, shared, device
        self.blocking = False
        self._end = _OneUse(lambda: shared.meet(self.peer))
        self._begun: set[_Begun] = set()

    @classmethod
    def pair(
        cls, ends: tuple[MemoryWire, MemoryWire], timeout_s: float, device: torch.device = CPU
    ) -> tuple["StrictWire", "StrictWire"]:
        """Both ends."""
        shared = _Shared(timeout_s)
        return cls(ends[0], shared, device), cls(ends[1], shared, device)

    def send(self, tensor: Tensor) -> Transfer:
        return self._begin(tensor, self._wire.send, sends=True)

    def receive(self, tensor: Tensor) -> Transfer:
        return self._begin(tensor, self._wire.receive, sends=False)

    def close(self) -> None:
        """This rank is gone."""
        self._wire.close()
        self._shared.close()

    def _begin(
        self, tensor: Tensor, start: Callable[[Tensor], Transfer], *, sends: bool
    ) -> Transfer:
        check(tensor, self._device)
        self._end.begin("send" if sends else "receive")
        self._shared.note(tensor, sends=sends)
        begun = _Begun(start(tensor), self._begun.discard)
        self._begun.add(begun)
        if self.blocking:
            begun.wait()
        return begun


class _Begun:
    """A transfer, which is kept until somebody has waited for it."""

    def __init__(self, transfer: Transfer, over: Callable[["_Begun"], None]) -> None:
        self._transfer, self._over = transfer, over

    def wait(self) -> None:
        self._over(self)
        self._transfer.wait()


class StrictReplica(MemoryReplica):
    """A replica whose stages are joined by strict wires.

    Args:
        ranks: how many.
        timeout_s: how long a rank waits for another one.
        device: of the stages.
        blocking: see :class:`StrictWire`.
    """

    def __init__(
        self,
        ranks: int,
        timeout_s: float = 30.0,
        device: torch.device = CPU,
        *,
        blocking: bool = True,
    ) -> None:
        super().__init__(ranks, timeout_s)
        self._device, self._blocking = device, blocking
        self._strict: dict[Any, tuple[StrictWire, StrictWire]] = {}
        self.lines = [_StrictLines(self, lines.coordinates) for lines in self.lines]

    def strict(self, wire: MemoryWire) -> StrictWire:
        """The strict end of an end."""
        with self._lock:
            [(key, ends)] = [pair for pair in self._wires.items() if wire in pair[1]]
            if key not in self._strict:
                self._strict[key] = StrictWire.pair(ends, self._timeout_s, self._device)
                for end in self._strict[key]:
                    end.blocking = self._blocking
            return self._strict[key][ends.index(wire)]

    def kill(self, rank: int) -> None:
        super().kill(rank)
        for (_, *ranks), (wire, _) in self._strict.items():
            if rank in ranks:
                wire.close()


class _StrictLines(MemoryLines):
    _replica: StrictReplica

    def wires(self, devices: Sequence[int]) -> dict[int, EdgeWires]:
        strict: Any = self._replica.strict
        return {
            edge: EdgeWires(strict(wires.activations), strict(wires.gradients), wires.host)
            for edge, wires in super().wires(devices).items()
        }


class StrictGroupOfRank(MemoryGroupOfRank):
    """What one rank sees of a group in memory, in which an operation that begins is over.

    Args:
        group: what it is made of.
        rank: number of the rank in it.
        device: where tensors must be.
    """

    def __init__(self, group: MemoryGroup, rank: int, device: torch.device) -> None:
        super().__init__(group, rank)
        self._device = device

    def _begin(self, tensors: list[Tensor], take: Callable[[Any], object]) -> Any:
        for tensor in tensors:
            check(tensor, self._device, collective=True)
        begun = super()._begin(tensors, take)
        begun.wait()
        return begun


# ---------------------------------------------------------------- process groups


class StrictGroup:
    """A process group of gloo that takes what NCCL takes.

    Args:
        group: of gloo.
    """

    made = 0
    """How many there were in this process."""

    def __init__(self, group: Any) -> None:
        StrictGroup.made += 1
        self._group = group
        self._end = _OneUse(lambda: group.barrier().wait())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensors: list[Tensor], other: int, tag: int) -> Any:
        return self._message("send", tensors, other, tag)

    def recv(self, tensors: list[Tensor], other: int, tag: int) -> Any:
        return self._message("recv", tensors, other, tag)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:
        return self._collective("allreduce", tensors, tensors, *options)

    def broadcast(self, tensors: list[Tensor], *options: Any) -> Any:
        return self._collective("broadcast", tensors, tensors, *options)

    def allgather(self, lists: list[list[Tensor]], tensors: list[Tensor], *options: Any) -> Any:
        return self._collective("allgather", [*tensors, *lists[0]], lists, tensors, *options)

    def _message(self, kind: str, tensors: list[Tensor], other: int, tag: int) -> Any:
        assert tag == 0, "NCCL knows no tags"
        [tensor] = tensors
        check(tensor, CPU)
        self._end.begin(kind)
        return getattr(self._group, kind)(tensors, other, tag)

    def _collective(self, kind: str, tensors: list[Tensor], *arguments: Any) -> Any:
        for tensor in tensors:
            check(tensor, CPU, collective=True)
        self._end.begin("collectives")
        return getattr(self._group, kind)(*arguments)


def strict(make_group: Callable[..., GroupHandle]) -> Callable[..., GroupHandle]:
    """`mesh.make_group` whose groups for tensors on devices are strict."""

    def make(store: Any, name: str, *arguments: Any) -> GroupHandle:
        handle = make_group(store, name, *arguments)
        if name.startswith(
            ("activations", "gradients", "data", "statistics", "owners", "siblings")
        ):
            handle._group = StrictGroup(handle._group)
        return handle

    return make


USUAL = mesh.make_group


def install() -> None:
    """From now on the groups of this process are strict."""
    mesh.make_group = strict(USUAL)
