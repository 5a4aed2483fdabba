"""Wires, channels and links within one process, for tests: ranks are threads.

They keep the promises of the real ones (:class:`~lightning_hybrid.comm.connections.Wire`): order,
sends that end when the peer begins to receive, receives that block, a peer that is gone
(:meth:`MemoryWire.close`), and one that does not answer within the time-out, after which the
connection is closed, as gloo does it. And like those of gloo, a transfer that is dropped before its
end never takes place.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from time import monotonic
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_hybrid.comm.connections import Transfer, Wire, connection_lost
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.replica_channels import EdgeWires, ReplicaWires

TIMEOUT_S = 30.0
"""How long a rank waits for another one: longer than any test."""


class _Connection:
    """What the two ends of a wire share: transfers that wait for the peer's, by direction."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.lost: str | None = None
        self._sent: tuple[deque[ref[_Transfer]], ...] = (deque(), deque())
        self._posted: tuple[deque[ref[_Transfer]], ...] = (deque(), deque())

    def add(self, transfer: "_Transfer", *, to: int, sends: bool) -> None:
        """Begin a transfer to the end of this number, and match what has a partner now."""
        with self.changed:
            if self.lost is not None:
                raise connection_lost(transfer.peer, RuntimeError(self.lost))
            (self._sent if sends else self._posted)[to].append(ref(transfer))
            sent, posted = self._sent[to], self._posted[to]
            while (source := _oldest(sent)) and (target := _oldest(posted)):
                with torch.inference_mode():  # as the rank may be whose tensor it is
                    target.tensor.copy_(source.tensor)
                source.over = target.over = True
                sent.popleft()
                posted.popleft()
            self.changed.notify_all()

    def lose(self, reason: str) -> None:
        with self.changed:
            self.lost = self.lost or reason
            self.changed.notify_all()


class _Transfer:
    def __init__(self, connection: _Connection, tensor: Tensor, peer: str) -> None:
        self._connection, self.tensor, self.peer = connection, tensor, peer
        self.over = False

    def wait(self) -> None:
        connection = self._connection
        end_s = monotonic() + connection.timeout_s
        with connection.changed:
            while not self.over and connection.lost is None:
                if not connection.changed.wait(end_s - monotonic()):
                    connection.lose("Timed out waiting")
            if not self.over:
                raise connection_lost(self.peer, RuntimeError(connection.lost))


def _oldest(transfers: "deque[ref[_Transfer]]") -> _Transfer | None:
    """The first one that was not dropped."""
    while transfers:
        transfer = transfers[0]()
        if transfer is not None:
            return transfer
        transfers.popleft()
    return None


class MemoryWire:
    """One end of a wire between two threads; :meth:`pair` makes both.

    Args:
        connection: what both ends share.
        me: number of this end, 0 or 1.
        peer: how to name the other rank in an error.
    """

    def __init__(self, connection: _Connection, me: int, peer: str) -> None:
        self.peer = peer
        self._connection, self._me = connection, me

    @classmethod
    def pair(
        cls, names: tuple[str, str] = ("rank 0", "rank 1"), timeout_s: float = TIMEOUT_S
    ) -> tuple["MemoryWire", "MemoryWire"]:
        """Two ends.

        Args:
            names: of the ranks; each end has the other's.
            timeout_s: how long a transfer may wait.
        """
        connection = _Connection(timeout_s)
        return cls(connection, 0, names[1]), cls(connection, 1, names[0])

    def send(self, tensor: Tensor) -> Transfer:
        return self._begin(tensor, to=1 - self._me, sends=True)

    def receive(self, tensor: Tensor) -> Transfer:
        return self._begin(tensor, to=self._me, sends=False)

    def close(self) -> None:
        """This rank is gone: transfers that have no partner yet fail, and all that begin later."""
        self._connection.lose("Connection closed by peer")

    def _begin(self, tensor: Tensor, *, to: int, sends: bool) -> Transfer:
        transfer = _Transfer(self._connection, tensor, self.peer)
        self._connection.add(transfer, to=to, sends=sends)
        return transfer


def memory_channels(
    names: tuple[str, str] = ("rank 0", "rank 1"), timeout_s: float = TIMEOUT_S
) -> tuple[Channel, Channel]:
    """The two ends of a channel."""
    here, there = MemoryWire.pair(names, timeout_s)
    return Channel(here), Channel(there)


class MemoryReplica:
    """The ranks of one replica, as threads of one process.

    Args:
        ranks: how many.
        timeout_s: how long a rank waits for another one.
    """

    def __init__(self, ranks: int, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._wires: dict[tuple[Hashable, int, int], tuple[MemoryWire, MemoryWire]] = {}
        self.lines = [MemoryLines(self, Coordinates(rank, 1, ranks)) for rank in range(ranks)]

    def wire(self, name: Hashable, here: int, there: int) -> MemoryWire:
        """This rank's end of the wire of this name to another rank."""
        first, second = sorted((here, there))
        key = name, first, second
        with self._lock:
            if key not in self._wires:
                names = f"rank {first}", f"rank {second}"
                self._wires[key] = MemoryWire.pair(names, self._timeout_s)
            return self._wires[key][here == second]

    def kill(self, rank: int) -> None:
        """A rank is gone: the others notice."""
        with self._lock:
            for (_, *ends), (wire, _) in self._wires.items():
                if rank in ends:
                    wire.close()


class MemoryLines(ReplicaWires):
    """The lines of one rank of a :class:`MemoryReplica`."""

    def __init__(self, replica: MemoryReplica, coordinates: Coordinates) -> None:
        super().__init__(coordinates)
        self._replica = replica

    def wires(self, devices: Sequence[int]) -> Mapping[int, EdgeWires]:
        here, found = self.coordinates.pp_rank, {}
        for edge, ends in enumerate(zip(devices, (*devices[1:], devices[0]))):
            if here in ends and ends[0] != ends[1]:
                there = ends[1 - ends.index(here)]
                names = ((kind, *devices, edge) for kind in EdgeWires._fields)
                found[edge] = EdgeWires(*(self._replica.wire(n, here, there) for n in names))
        return found

    def wire(self, pp_rank: int, tag: int) -> Wire:
        return self._replica.wire(tag, self.coordinates.pp_rank, pp_rank)


class MemoryGroup:
    """A process group of threads: the collectives that ranks of a stage use.

    Args:
        size: number of its ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._parts: dict[int, dict[int, list[Tensor]]] = {}

    def of(self, rank: int) -> "MemoryGroupOfRank":
        """The group, as a rank of it has it."""
        return MemoryGroupOfRank(self, rank)

    @property
    def size(self) -> int:
        """Number of its ranks."""
        return self._size

    def meet(self, number: int, rank: int, parts: list[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Give the tensors of one rank for the collective of this number; returns what waits."""
        with self._changed:
            self._parts.setdefault(number, {})[rank] = [part.clone() for part in parts]
            self._changed.notify_all()

        def wait() -> list[list[Tensor]]:
            with self._changed:
                all_here = self._changed.wait_for(
                    lambda: len(self._parts[number]) == self._size, TIMEOUT_S
                )
                if not all_here:
                    raise RuntimeError(f"collective {number} of rank {rank}: timed out")
                return [self._parts[number][each] for each in range(self._size)]

        return wait


class MemoryGroupOfRank:
    """What one rank sees of a :class:`MemoryGroup`."""

    def __init__(self, group: MemoryGroup, rank: int) -> None:
        self._group, self._rank, self._count = group, rank, 0

    def size(self) -> int:
        return self._group.size

    def rank(self) -> int:
        return self._rank

    def allreduce(self, tensors: list[Tensor], *_: Any) -> Any:
        return self._begin(
            tensors,
            lambda all_parts: tensors[0].copy_(
                sum(parts[0].to(tensors[0].device) for parts in all_parts)
            ),
        )

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        return self._begin(
            tensors, lambda all_parts: tensors[0].copy_(all_parts[options.rootRank][0])
        )

    def allgather(self, lists: list[list[Tensor]], tensors: list[Tensor], *_: Any) -> Any:
        def take(all_parts: list[list[Tensor]]) -> None:
            for target, parts in zip(lists[0], all_parts):
                target.copy_(parts[0])

        return self._begin(tensors, take)

    def _begin(self, tensors: list[Tensor], take: Callable[[Any], object]) -> Any:
        wait = self._group.meet(self._count, self._rank, tensors)
        self._count += 1
        return SimpleNamespace(wait=lambda: take(wait()))
