"""Servers: the processes that a driver starts for its other devices.

A server runs none of the user's code. It gets orders through its standard input: to join the run
that its driver begins, and to serve in it. It ends when that closes, so with its driver.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, ClassVar

import torch
from torch import nn

from lightning_hybrid.comm import Coordinates
from lightning_hybrid.planning import Machine
from lightning_hybrid.process.joining import History, Meeting
from lightning_hybrid.stage import ModuleOutline, StageOptions


@dataclass(frozen=True, kw_only=True)
class JoinOrder:
    """An order to meet the driver and its other servers, and to join their mesh.

    Attributes:
        history: which groups the driver has.
        coordinates: coordinates of the server.
        meeting: where the ranks meet.
        backend: the option ``process_group_backend``.
        timeout: of tensors between ranks.
        device: device of the server.
        surveys: whether the devices must be known.
        machine: the devices, if the driver knows them already.
        capacity: relative speeds of the devices, from the user.
    """

    history: History
    coordinates: Coordinates
    meeting: Meeting
    backend: str
    timeout: timedelta
    device: torch.device
    surveys: bool
    machine: Machine | None
    capacity: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class ServeOrder:
    """An order to serve the driver until its run is over.

    Attributes:
        module: what the LightningModule consists of.
        options: how stages compute.
        timed: whether the time in which the server computes is added up.
        dtype: torch's default type of numbers, which the user's script may have set.
        threads: number of threads of an operation on CPUs.
    """

    module: ModuleOutline
    options: StageOptions
    timed: bool
    dtype: torch.dtype
    threads: int

    @classmethod
    def of(cls, module: nn.Module, options: StageOptions, *, timed: bool) -> "ServeOrder":
        """The order to serve in a run of this process."""
        return cls(
            module=ModuleOutline.of(module),
            options=options,
            timed=timed,
            dtype=torch.get_default_dtype(),
            threads=torch.get_num_threads(),
        )


Order = JoinOrder | ServeOrder


class Servers:
    """The servers that this process has started, shared by all its Trainers."""

    processes: ClassVar[list["subprocess.Popen[bytes]"]] = []  # of ranks 1, 2, ...


def start_servers(number: int) -> list["subprocess.Popen[bytes]"]:
    """Start servers for ranks 1 to ``number``, as far as they do not run yet. Returns the new ones.

    The old ones wait for orders of this process since its last run.
    """
    new = []
    # (so that what stages use of the user's modules is found as the script finds it)
    paths = os.pathsep.join(dict.fromkeys(path or str(Path.cwd()) for path in sys.path))
    for rank in range(len(Servers.processes) + 1, number + 1):
        command = [sys.executable, "-m", "lightning_hybrid.worker", str(rank)]
        environment = os.environ | {"PYTHONPATH": paths, "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        new.append(process)
    Servers.processes += new
    return new


def give(orders: Sequence[Order]) -> None:
    """Give each of the first servers an order, those of ranks 1, 2, ... in turn.

    One that has ended gets none: whoever waits for it notices that.
    """
    for process, order in zip(Servers.processes, orders):
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(pickle.dumps(order))
            process.stdin.flush()


def dismiss_servers() -> None:
    """At the end of the script: the servers get no more orders, and end."""
    for process in Servers.processes:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def orders(source: BinaryIO) -> Iterator[Order]:
    """On a server, the orders that come, until the driver is gone.

    Args:
        source: the standard input.
    """
    while True:
        try:
            order: Order = pickle.load(source)
        except EOFError:
            return
        yield order
