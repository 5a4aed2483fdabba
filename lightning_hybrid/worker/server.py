"""A server: a process that only serves a driver, from the start of its script to its end."""

import os
import signal
import sys
from dataclasses import replace

import torch

from lightning_hybrid.comm import ConnectionLost, backend_on
from lightning_hybrid.planning import Cluster, give_back_memory
from lightning_hybrid.process import (
    JoinOrder,
    NoWorld,
    ServeOrder,
    World,
    follow,
    join,
    know_machine,
    look_around,
    orders,
    reach,
)
from lightning_hybrid.stage import Stopwatch
from lightning_hybrid.worker.worker import serve


class Server:
    """Carries out a driver's orders: joins its runs, and serves in them.

    A run that fails is over for the server too; the driver may begin another one.
    """

    def __init__(self) -> None:
        self._world: World | NoWorld = NoWorld()
        self._place = "a server"

    def run(self) -> int:
        """Carry out orders until the driver is gone. Returns the exit code of this process."""
        # Ctrl-C reaches all processes of a terminal: the driver alone decides what follows
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # (a copy, since what this process computes with may not read orders by accident)
        source = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        for order in orders(source):
            try:
                if isinstance(order, JoinOrder):
                    self._join(order)
                elif isinstance(self._world, World):  # else it could not join the run
                    self._serve(self._world, order)
            except Exception as error:
                if isinstance(self._world, NoWorld) and not isinstance(error, ConnectionLost):
                    raise  # there is no store yet in which the driver could read of it
                self._world.fail(error, self._place)
                self._world.leave()
                self._world = NoWorld()
        return 0

    def _join(self, order: JoinOrder) -> None:
        """Meet the driver and its other servers, and join their mesh."""
        here, device = order.coordinates, order.device
        self._place = str(here)
        size = here.replicas * here.ranks_per_replica
        backend = backend_on(device, order.backend)
        if device.type == "cuda":  # as Lightning does for a rank that runs the script
            torch.cuda.set_device(device)
        follow(order.history)
        know_machine(order.machine, size, device, backend, order.capacity)
        self._world = world = World(reach(here, order.meeting), order.timeout)
        world.begin()

        def survey(group: object) -> Cluster:
            machine = look_around(group, device, backend, order.capacity)
            cluster = machine.cluster(here.replicas, here.ranks_per_replica)
            return replace(cluster, order=here.order or cluster.order)

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
        world.serve()  # (from here on the driver tells of failures elsewhere)

    def _serve(self, world: World, order: ServeOrder) -> None:
        """Serve the driver until its run is over."""
        torch.set_default_dtype(order.dtype)
        torch.set_num_threads(order.threads)
        mesh = world.mesh
        watch = Stopwatch(mesh.device) if order.timed else None
        serve(order.module.shell(), mesh, order.options, watch)
        give_back_memory()
        world.end_run()
