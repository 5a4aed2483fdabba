"""A server: a process that is a worker in runs of the script, by the orders of rank 0."""

import gc
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.comm import ConnectionLost, Failure, Group, backend_on
from lightning_hybrid.planning import Cluster
from lightning_hybrid.process import (
    EndOrder,
    JoinOrder,
    Meeting,
    NoWorld,
    Order,
    RestOrder,
    ServeOrder,
    World,
    cluster_of,
    drop_what_driver_lacks,
    join,
    look_around,
    orders,
    reach,
    store_of_all,
)
from lightning_hybrid.profiling import give_back_memory
from lightning_hybrid.remote import vacate
from lightning_hybrid.stage import Stopwatch
from lightning_hybrid.worker.worker import serve


class Server:
    """Carries out orders of rank 0: joins runs, and serves in them as a worker.

    A run that fails is over for the server too; the drivers may begin another one.

    Args:
        rank: global rank of this process.
        local_rank: number of this process on its host.
        meeting: where the ranks meet: the address of their store.
        world: the run that this process has joined already, by the script; ``None``: it is in none.
    """

    def __init__(
        self, rank: int, local_rank: int, meeting: Meeting, world: World | None = None
    ) -> None:
        self._rank = rank
        self._local_rank = local_rank
        self._meeting = meeting
        self._world: World | NoWorld = world or NoWorld()
        self._place = f"rank {rank} (worker)" if world is None else str(world.coordinates)

    def run(self, given: Iterable[Order]) -> int:
        """Carry out orders until one says to end, or there are no more.

        Args:
            given: the orders; it waits for the next one.

        Returns:
            The exit code of this process.
        """
        # Ctrl-C reaches all processes of a terminal: the drivers alone decide what follows
        with suppress(ValueError):  # the script has called the Trainer in another thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for order in given:
            if isinstance(order, EndOrder):
                return order.code
            if not self._carries_out(order):
                # (now that the error is gone: transfers in its frames, and in cycles with the
                # networks, keep connections open, by which other ranks would wait for this one)
                gc.collect()
        return 0

    def _carries_out(self, order: Order) -> bool:
        """Carry out an order but an `EndOrder`. Returns whether that went well.

        Raises:
            Exception: it did not, and there is no store yet by which to tell the drivers.
        """
        try:
            if isinstance(order, JoinOrder):
                self._join(order)
            elif isinstance(self._world, World) and not isinstance(order, EndOrder):
                self._serve(self._world, order)  # (else it is not in the run)
        except Exception as error:
            if isinstance(self._world, NoWorld) and not isinstance(error, ConnectionLost):
                raise
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        """Leave a run that has failed, here or on another rank, and tell the other ranks of it.

        Args:
            error: the error by which this rank has noticed it.
        """
        world, self._world = self._world, NoWorld()
        first = world.fail(error, self._place)
        if isinstance(world, World) and world.has_coordinates:
            # (no connection ends with this process, which stays, so the driver would wait on)
            world.mesh.say_goodbye(first or Failure.of(error, self._place))
        world.leave()

    def _join(self, order: JoinOrder) -> None:
        """Meet the other ranks of a run, and make this rank's part of their mesh.

        Collective over all ranks of the run. If the run has too few ranks for this one, this rank
        is in no run from then on.
        """
        if isinstance(self._world, World):  # (in which sizes were chosen)
            self._world.stop_watching()
        size = order.coordinates.replicas * order.coordinates.ranks_per_replica
        self._world = NoWorld()
        if self._rank >= size:
            return
        here, device = replace(order.coordinates, rank=self._rank), order.devices[self._local_rank]
        self._place = str(here)
        backend = backend_on(device, order.backend)
        if device.type == "cuda":  # as Lightning does for a rank that runs the script
            torch.cuda.set_device(device)
        drop_what_driver_lacks(order.history)
        self._world = world = World(reach(here, self._meeting), order.timeout)
        world.begin()
        if order.lone:
            look_around(world.everyone.world, device, backend, order.capacity)
            world.serve()
            return

        def survey(group: Group) -> Cluster:
            machine = look_around(group, device, backend, order.capacity)
            return cluster_of(group, machine, here)

        joined = join(
            world.everyone,
            here,
            backend=order.backend,
            timeout=order.timeout,
            device=device,
            survey=survey if order.surveys else None,
            capacity=order.capacity,
        )
        world.take_coordinates(joined)
        self._place = str(world.coordinates)
        world.serve()  # (from here on drivers tell of failures elsewhere)

    def _serve(self, world: World, order: ServeOrder | RestOrder) -> None:
        """Serve the driver of this rank until its run is over, then leave the run.

        Args:
            world: the run.
            order: how to serve; a `RestOrder`: no model was set up, so the run is left at once.
        """
        if isinstance(order, ServeOrder):
            torch.set_default_dtype(order.dtype)
            torch.set_num_threads(order.threads)
            mesh = world.mesh
            world.survive(survives=order.survives)
            statistics = mesh.statistics() if order.synchronised else None
            options = replace(order.options, statistics=statistics)
            watch = Stopwatch(mesh.device) if order.timed else None
            serve(order.module.shell(), mesh, options, watch, shards=order.shards)
            give_back_memory()
        world.end_run()


def serve_here(server: Server, given: Iterable[Order], module: nn.Module | None) -> NoReturn:
    """Let this process, which a launcher has started on the script, be a server up to its end.

    It never returns: the process ends with the code of :meth:`Server.run`, or with 1 after an
    error. No code of the script that has called it runs any more, not even ``finally`` and exit
    functions.

    Args:
        server: carries out orders.
        given: the orders.
        module: the module that the script has made; its memory is freed. ``None``: there is none.
    """
    code = 1
    try:
        for tensor in () if module is None else (*module.parameters(), *module.buffers()):
            vacate(tensor)
        code = server.run(given)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def main(rank: int) -> int:
    """Run a server in a process that rank 0 has started for it on its own host.

    Args:
        rank: global rank of this process.

    Returns:
        The exit code of the process.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    meeting = Meeting(address, port, hosts=1, serve=False)
    try:
        store = store_of_all(meeting, rank, size=0)
    except dist.DistError:  # rank 0 is gone before its first run
        return 0
    return Server(rank, rank, meeting).run(orders(store, rank, after=0))
