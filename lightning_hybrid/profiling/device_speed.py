"""Describe a device: measure its speed, and look up its free memory.

The unit of work is a matrix product and a pass over memory, of equal time on a CPU, as layers
consist of such operations. Units are counted in a *window* of time instead of timing one: a process
that may run half of the time does half as many, but may well end a single one without a pause.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable

import torch

from lightning_hybrid.planning import Device
from lightning_hybrid.profiling.measure import clock_of, device_name
from lightning_hybrid.profiling.memory_free import host_bytes, memory_limits

WINDOW_S = 0.1
"""Seconds of a window: the period of CPU quotas in Linux, and many time slices of its scheduler."""
WINDOWS = 3
"""Number of windows of a short measurement; their median is the result."""
LONG_S = 2.5
"""Seconds of a long measurement, which short bursts of other work disturb little."""
_PASSES = 2.0
"""Passes of an optimizer over its parameters, as a multiple of the pass that is timed."""
_UPDATES = 4


def describe_device(device: torch.device, speed: tuple[float, float] = (0.0, 0.0)) -> Device:
    """Describe this process's device: host, model, free memory, cores and threads.

    Args:
        device: device of this process.
        speed: units of work per second of wall-clock time and of the profiling clock, from
            `measure_speed`; zeros: not measured.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    on_cpu = device.type == "cpu"
    return Device(
        host=socket.gethostname(),
        name=device_name(device),
        # that of the whole host: it is divided when the ranks of the host are known
        memory_bytes=host_bytes() if on_cpu else torch.cuda.mem_get_info(device)[0],
        memory_limits=memory_limits() if on_cpu else (),
        cores=tuple(sorted(cores)) if on_cpu else (),
        threads=torch.get_num_threads() if on_cpu else 0,
        units_per_s=speed[0],
        units_per_own_s=speed[1],
    )


def measure_speed(device: torch.device, *, long: bool = False) -> tuple[float, float]:
    """Measure how many units of benchmark work a device does per second.

    It takes ``WINDOWS * WINDOW_S`` seconds, or ``LONG_S``, and a warm-up. All ranks of a host must
    call it at the same time, since they slow each other down in a run too.

    Args:
        device: device of this process.
        long: whether the measurement takes longer, so that other work disturbs it less.

    Returns:
        Units per second of wall-clock time; and units per second of the clock with which networks
        are profiled (see `clock_of`).
    """
    unit, clock = _unit(device), clock_of(device)
    # a warm-up, which allocates memory and loads kernels
    unit()
    clock()
    if long:
        return _window(unit, clock, LONG_S)
    windows = [_window(unit, clock, WINDOW_S) for _ in range(WINDOWS)]
    wall, own = (statistics.median(column) for column in zip(*windows))
    return wall, own


@torch.inference_mode()
def update_s_per_byte(device: torch.device) -> float:
    """Measure the seconds of an optimizer step per byte of parameters.

    The optimizer is not known before a run: the result is about that of SGD with momentum, for
    parameters that are not in a cache.

    Args:
        device: device to measure on.
    """
    # larger than the caches of most CPUs
    parameters, gradients = (
        torch.zeros(2**22, dtype=torch.float32, device=device) for _ in range(2)
    )
    clock = clock_of(device)
    best_s = float("inf")
    for _ in range(_UPDATES):
        start_s = clock()
        parameters.add_(gradients, alpha=-0.1)
        # the minimum, since other work can only make it slower
        best_s = min(best_s, clock() - start_s)
    return _PASSES * best_s / parameters.nbytes


def _window(
    unit: Callable[[], object], clock: Callable[[], float], length_s: float
) -> tuple[float, float]:
    """Compute units of work for `length_s` seconds, and count them.

    Args:
        unit: function that computes one unit.
        clock: the clock with which networks are profiled; reading it waits for the unit.
        length_s: seconds of wall-clock time.

    Returns:
        Units per second of wall-clock time, and units per second of ``clock``.
    """
    start_s, start = time.perf_counter(), clock()
    count = 0
    while time.perf_counter() - start_s < length_s:
        unit()
        clock()  # waits for the unit on an accelerator
        count += 1
    return count / (time.perf_counter() - start_s), count / (clock() - start)


def _unit(device: torch.device) -> Callable[[], object]:
    """Make a function that computes one unit of benchmark work on a device."""
    width, length = (384, 2**22) if device.type == "cpu" else (2048, 2**25)
    a, b = (torch.ones(width, width, dtype=torch.float32, device=device) for _ in range(2))
    long = torch.ones(length, dtype=torch.float32, device=device)

    @torch.inference_mode()
    def run() -> None:
        torch.mm(a, b)
        long.mul_(1.0)

    return run
