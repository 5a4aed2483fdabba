"""Ranks as threads, and the two kinds of wires that tests of `comm` run over."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from in_memory import MemoryWire

from lightning_hybrid.comm.connections import GroupHandle, GroupWire, Wire

NAMES = ("rank 0", "rank 1")


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions in threads of their own. Returns their values, or raises the first error."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(index: int, function: Callable[[], Any]) -> None:
        try:
            results[index] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


def gloo_groups(timeout_s: float) -> list[Any]:
    """The two ends of a gloo group, in one process."""
    store = dist.HashStore()
    timeout = timedelta(seconds=timeout_s)
    return together(
        *(lambda rank=rank: dist.ProcessGroupGloo(store, rank, 2, timeout) for rank in (0, 1))
    )


class GlooWires:
    """Pairs of wires over one gloo group.

    Attributes:
        timeout_s: how long a transfer may wait.
    """

    def __init__(self, timeout_s: float = 30) -> None:
        self._groups = [GroupHandle(group) for group in gloo_groups(timeout_s)]
        self._tags = 0

    def pair(self) -> tuple[Wire, Wire]:
        self._tags += 1
        return (
            GroupWire(self._groups[0], 1, NAMES[1], self._tags),
            GroupWire(self._groups[1], 0, NAMES[0], self._tags),
        )

    def kill(self, rank: int) -> None:
        """The sockets of a group that is destroyed are closed, like those of a dead process."""
        self._groups[rank].close()

    def close(self) -> None:
        for group in self._groups:
            group.close()


class MemoryWires:
    """Pairs of wires in memory."""

    def __init__(self, timeout_s: float = 30) -> None:
        self._timeout_s = timeout_s
        self._pairs: list[tuple[MemoryWire, MemoryWire]] = []

    def pair(self) -> tuple[Wire, Wire]:
        self._pairs.append(MemoryWire.pair(NAMES, self._timeout_s))
        return self._pairs[-1]

    def kill(self, rank: int) -> None:
        for ends in self._pairs:
            ends[rank].close()

    def close(self) -> None:
        self.kill(0)


WIRES = {"gloo": GlooWires, "memory": MemoryWires}
