"""Servers: the processes that compute earlier stages, and run none of the user's code.

A server is started as ``python -m lightning_hybrid.worker``; or it is a process of a launcher that
has started the script on every rank, from the moment when the script's Trainer finds that its rank
is a worker. From then on it carries out orders, which rank 0 leaves in the store: to join a run, to
serve in it, and to end with the script of rank 0.
"""

import atexit
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.comm import Coordinates
from lightning_hybrid.process.joining import MEETING_TIMEOUT, History
from lightning_hybrid.process.watchdogs import HostWatch
from lightning_hybrid.stage import ModuleOutline, StageOptions


@dataclass(frozen=True, kw_only=True)
class JoinOrder:
    """An order to meet the other ranks of a run, and to join their mesh.

    Attributes:
        history: which groups rank 0 has from earlier runs.
        coordinates: coordinates of rank 0. A server replaces ``rank`` by its own.
        backend: the option ``process_group_backend``.
        timeout: time-out of tensors between ranks.
        devices: the devices of a host, by local rank; equal on all hosts.
        surveys: whether all ranks survey their devices together.
        capacity: relative speeds of the devices by global rank, from the user; ``None``: measured.
        lone: whether sizes are still to be chosen on rank 0: then devices are surveyed, and no mesh
            is joined. The next order is another one to join.
    """

    history: History
    coordinates: Coordinates
    backend: str
    timeout: timedelta
    devices: tuple[torch.device, ...]
    surveys: bool
    capacity: tuple[float, ...] | None
    lone: bool = False


@dataclass(frozen=True, kw_only=True)
class ServeOrder:
    """An order to serve until the run is over.

    Attributes:
        module: what the LightningModule consists of.
        options: how stages compute.
        synchronised: whether batch statistics are taken over the replicas.
        shards: whether states of optimizers are divided over the replicas.
        survives: whether the other replicas go on if one is lost (``BySpeed(on_loss="continue")``).
        timed: whether the server adds up the time in which it computes.
        dtype: default type of numbers in the script (`torch.get_default_dtype`), for the server to
            set.
        threads: number of threads of an operation on CPUs in the script, for the server to set.
    """

    module: ModuleOutline
    options: StageOptions
    synchronised: bool = False
    shards: bool = False
    survives: bool = False
    timed: bool = False
    dtype: torch.dtype
    threads: int

    @classmethod
    def of(cls, module: nn.Module, options: StageOptions, **more: bool) -> "ServeOrder":
        """Make the order for a run of this process, with torch's settings of this process.

        Args:
            module: the LightningModule, or a model of Fabric; only its outline is in the order.
            options: how stages compute.
            more: values for ``synchronised``, ``shards``, ``survives`` and ``timed``.
        """
        return cls(
            module=ModuleOutline.of(module),
            options=options,
            dtype=torch.get_default_dtype(),
            threads=torch.get_num_threads(),
            **more,
        )


@dataclass(frozen=True)
class RestOrder:
    """An order to serve nobody and only wait for the end of the run.

    Rank 0 gives it when a function under Fabric returns without having set up a model.
    """


@dataclass(frozen=True)
class EndOrder:
    """An order to end the process of a server: the script is over, or a driver takes its place.

    Attributes:
        code: exit code with which the server ends.
        ranks: global ranks of the servers that end; empty: all of them.
    """

    code: int
    ranks: frozenset[int] = frozenset()


Order = JoinOrder | ServeOrder | RestOrder | EndOrder

_LATEST = "orders"
_PATIENCE = timedelta(days=365)  # a script may rest between its runs
_FAREWELL_S, _NAP_S = 5.0, 0.01


class Servers:
    """The servers of this script, as attributes of the class, shared by all Trainers.

    Attributes:
        ranks: global ranks of the servers, which run no script (any more). Equal on all ranks that
            run the script.
        lone: whether rank 0 alone runs the script only until it has chosen open sizes. Then drivers
            are started in the places of some servers.
    """

    ranks: ClassVar[set[int]] = set()
    lone: ClassVar[bool] = False
    _ends: ClassVar[bool] = False

    @classmethod
    def add(cls, ranks: Iterable[int], store: dist.Store, *, host: bool) -> None:
        """Note ranks that are servers from now on.

        On rank 0 the first call also registers that servers are told to end with this process.

        Args:
            ranks: global ranks of the servers.
            store: the store in which they look for orders.
            host: whether this process is rank 0, which hosts the store and gives the orders.
        """
        cls.ranks.update(ranks)
        if host and cls.ranks and not cls._ends:
            cls._ends = True
            atexit.register(_dismiss, store)


def start_server(rank: int) -> "subprocess.Popen[bytes]":
    """Start a server process on this host; it finds the store by this process's environment.

    The variables ``MASTER_ADDR`` and ``MASTER_PORT`` must be set.

    Args:
        rank: global rank of the server, which on the only host is its local rank too.

    Returns:
        The process, which this function does not wait for.
    """
    # (so that what stages use of the user's modules is found as the script finds it)
    paths = os.pathsep.join(dict.fromkeys(path or str(Path.cwd()) for path in sys.path))
    # (-P: what lies in the current folder, and is not of the script, would come before all else)
    command = [sys.executable, "-P", "-m", "lightning_hybrid.worker", str(rank)]
    # (torch would print its stack when the store goes with this process)
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment = quiet | os.environ | {"PYTHONPATH": paths, "LOCAL_RANK": str(rank)}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)


def end_servers(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    """Wait until servers have ended that this process has ordered to, and kill those that do not.

    Args:
        processes: their processes.
    """
    for process in processes:
        try:
            process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def give(store: Any, order: Order) -> None:
    """On rank 0, leave an order in the store for all servers, which carry out orders in turn.

    Args:
        store: a ``torch.distributed.Store``, in which the servers look for orders.
        order: the order.
    """
    number = store.add(_LATEST, 1)
    store.set(_key(number), pickle.dumps(order))


def latest_order(store: dist.Store) -> int:
    """Return the number of the latest order in a store; orders count from 1, 0: there is none."""
    return store.add(_LATEST, 0)


def orders(
    store: Any, rank: int, after: int, timeout: timedelta = MEETING_TIMEOUT
) -> Iterator[Order]:
    """On a server, wait for each order of rank 0 and yield it, without end.

    An `EndOrder` is to end the server. If the connection to the store breaks, the last order is an
    ``EndOrder(1)``; if rank 0 stops answering, the process is ended (:class:`HostWatch`).

    Args:
        store: the ``torch.distributed.Store`` in which rank 0 leaves the orders.
        rank: global rank of this server.
        after: number of the order (:func:`latest_order`) after which to begin.
        timeout: how long rank 0 may not answer; each `JoinOrder` sets it anew.
    """
    own = store.clone()  # a wait for an order must not hold up other requests
    watch = HostWatch(f"rank {rank} (worker)", store, timeout)
    with closing(watch):
        while True:
            after += 1
            try:
                own.wait([_key(after)], _PATIENCE)
                order: Order = pickle.loads(own.get(_key(after)))
            except dist.DistNetworkError:
                yield EndOrder(1)  # (an agent that hears of it may start this rank again)
                return
            if isinstance(order, EndOrder):
                if order.ranks and rank not in order.ranks:
                    continue
                with suppress(dist.DistNetworkError):  # (rank 0 waits no longer)
                    own.set(_farewell(rank), "")
            elif isinstance(order, JoinOrder):
                watch.timeout = order.timeout
            yield order


def _key(number: int) -> str:
    return f"order {number}"


def _farewell(rank: int) -> str:
    return f"server {rank} ends"


def _dismiss(store: dist.Store) -> None:
    """On rank 0, tell all servers to end, and wait for a moment until they have read it.

    Called at the exit of the script. Servers end with code 1 if an error has ended the script, as
    far as this is known, else with 0.

    Args:
        store: the store in which servers look for orders.
    """
    failed = getattr(sys, "last_value", None) is not None  # an error that nobody has caught
    with suppress(RuntimeError):  # the store is gone
        give(store, EndOrder(int(failed)))
        # (its host must not be gone before they have read that, as far as they live)
        deadline, words = time.monotonic() + _FAREWELL_S, [_farewell(r) for r in Servers.ranks]
        while not (failed or store.check(words)) and time.monotonic() < deadline:
            time.sleep(_NAP_S)
