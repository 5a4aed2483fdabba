"""How fast a device is, and how much memory it has left.

The benchmark is a matrix product and a pass over memory, in equal parts on a CPU: what layers are
made of. It counts how often that can be done in a *window* of time, not how long one takes: a
process that may run half of the time does one as fast as ever, and half as many.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable

import torch

from lightning_hybrid.planning.cluster import Device
from lightning_hybrid.planning.measure import clock_of, device_name
from lightning_hybrid.planning.memory_free import host_bytes, memory_limits

WINDOW_S = 0.1
"""The period of Linux' CPU quotas, and many turns of its scheduler."""
WINDOWS = 3
"""Their median counts."""
LONG_S = 2.5
"""Of a look that bursts of other work do not disturb much: they are over, or met everybody."""
_PASSES = 2.0
"""Optimizers go over their parameters more often than the one pass that is timed."""
_UPDATES = 4


def look_at(device: torch.device, speed: tuple[float, float] = (0.0, 0.0)) -> Device:
    """What can be said of a device, with what `measure_speed` says of it."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    on_cpu = device.type == "cpu"
    return Device(
        host=socket.gethostname(),
        name=device_name(device),
        # all of a host: its ranks are known later, and divide it then
        memory_bytes=host_bytes() if on_cpu else torch.cuda.mem_get_info(device)[0],
        memory_limits=memory_limits() if on_cpu else (),
        cores=tuple(sorted(cores)) if on_cpu else (),
        threads=torch.get_num_threads() if on_cpu else 0,
        units_per_s=speed[0],
        units_per_own_s=speed[1],
    )


def measure_speed(device: torch.device, *, long: bool = False) -> tuple[float, float]:
    """Units of work in a second of a device: by the wall clock, and by the clock of the profile.

    Takes ``WINDOWS * WINDOW_S``, or ``LONG_S``, and a warm-up. On a host that several ranks share
    all of them must run it at the same time, or it tells the speed of a machine that they will not
    have.
    """
    unit, clock = _unit(device), clock_of(device)
    # the first one allocates memory and loads kernels
    unit()
    clock()
    if long:
        return _window(unit, clock, LONG_S)
    windows = [_window(unit, clock, WINDOW_S) for _ in range(WINDOWS)]
    wall, own = (statistics.median(column) for column in zip(*windows))
    return wall, own


@torch.inference_mode()
def update_s_per_byte(device: torch.device) -> float:
    """What the step of an optimizer takes per byte of parameters, which are in no cache.

    Which optimizer it will be is not known before a run: SGD with momentum takes about as long.
    """
    # more than the caches of most CPUs hold
    parameters, gradients = (torch.zeros(2**22, device=device) for _ in range(2))
    clock = clock_of(device)
    best_s = float("inf")
    for _ in range(_UPDATES):
        start_s = clock()
        parameters.add_(gradients, alpha=-0.1)
        # the least: other work makes it slower, and nothing makes it faster
        best_s = min(best_s, clock() - start_s)
    return _PASSES * best_s / parameters.nbytes


def _window(
    unit: Callable[[], object], clock: Callable[[], float], length_s: float
) -> tuple[float, float]:
    start_s, start = time.perf_counter(), clock()
    count = 0
    while time.perf_counter() - start_s < length_s:
        unit()
        clock()  # on an accelerator: until it is done
        count += 1
    return count / (time.perf_counter() - start_s), count / (clock() - start)


def _unit(device: torch.device) -> Callable[[], object]:
    width, length = (384, 2**22) if device.type == "cpu" else (2048, 2**25)
    a, b = (torch.ones(width, width, device=device) for _ in range(2))
    long = torch.ones(length, device=device)

    @torch.inference_mode()
    def run() -> None:
        torch.mm(a, b)
        long.mul_(1.0)

    return run
