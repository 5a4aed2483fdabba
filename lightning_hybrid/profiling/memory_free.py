"""Find how much memory this process may still use: free memory of its host, and limits on it.

Limits are those of the process's control group and of all groups above it (cgroups of Linux, both
versions), and the limit on its address space (``ulimit -v``).
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Limit = tuple[str, int]
"""Name of what has the limit (a control group, or a process), and bytes left. Processes of a host
share a limit if its name is the same for them."""

_FILES = {
    # by version of cgroups: files with the limit and the use, and prefix of the counters in
    # memory.stat (in version 1, counters without the prefix leave out the groups below)
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def host_bytes(proc: Path = Path("/proc")) -> int | None:
    """Bytes that all processes of this host together may still use; ``None``: not known.

    Args:
        proc: folder with the files of processes in Linux.
    """
    with suppress(OSError):
        for line in (proc / "meminfo").read_text().splitlines():
            # it includes caches that the system frees on demand, unlike MemFree
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def memory_limits(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[Limit, ...]:
    """List the limits on the memory of this process, each with the bytes that are left.

    Args:
        proc: folder with the files of processes in Linux.
        cgroups: folder with the files of control groups.

    Returns:
        For each limit its name (see `Limit`) and the bytes that are left, 0 or more.
    """
    return (*_of_groups(proc, cgroups), *_of_address_space(proc))


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of the host's memory that this process may still use; ``None``: not known.

    It is the least of the host's free memory and what `memory_limits` leaves, if meanwhile no other
    process takes any.
    """
    host, limits = host_bytes(proc), [left for _, left in memory_limits(proc, cgroups)]
    return min(limits if host is None else [host, *limits], default=None)


def give_back_memory() -> None:
    """Return memory that this process has freed, and that its allocator still keeps, to the system.

    Only glibc can; elsewhere nothing happens.
    """
    with suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def free_on(device: torch.device) -> int | None:
    """Bytes that this process may still use: of the host's memory on a CPU, of a GPU's on a GPU.

    ``None``: not known.
    """
    return free_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def free_of_host(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the processes of this process's control group may still use together.

    ``None``: not known. The free memory of the host limits them too. The limit on the address space
    does not count: each process has its own.
    """
    host, groups = host_bytes(proc), [left for _, left in _of_groups(proc, cgroups)]
    return min(groups if host is None else [host, *groups], default=None)


def free_addresses(proc: Path = Path("/proc")) -> int | None:
    """Bytes by which the address space of this process may still grow; ``None``: no limit."""
    return next((left for _, left in _of_address_space(proc)), None)


def _of_groups(proc: Path, cgroups: Path) -> Iterator[Limit]:
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self/cgroup").read_text().splitlines()
    for line in lines:
        _, kind, group = line.split(":", 2)
        if kind and "memory" not in kind.split(","):
            continue
        roots = [cgroups / "memory"] if kind else [cgroups, cgroups / "unified"]
        limit, used, prefix = _FILES[1 if kind else 2]
        path = PurePosixPath(group.lstrip("/"))
        # in a container the path may be that on the host, while its own group is at the root
        for root in roots:
            for place in dict.fromkeys(root / part for part in (path, *path.parents)):
                with suppress(OSError, ValueError):  # no such file, or "max"
                    most = int((place / limit).read_text())
                    free = most - int((place / used).read_text()) + _cached(place, prefix)
                    if most < 2**60:  # version 1 has a larger number if there is no limit
                        yield str(place), max(0, min(free, most))


def _cached(place: Path, prefix: str) -> int:
    """Bytes of cached file pages in a control group: they count as used, but are freed on demand.

    Args:
        place: folder of the group.
        prefix: prefix of the counters in its file ``memory.stat``.
    """
    names = [f"{prefix}inactive_file", f"{prefix}active_file"]
    with suppress(OSError):
        fields = (line.split() for line in (place / "memory.stat").read_text().splitlines())
        return sum(int(value) for name, value in fields if name in names)
    return 0


def _of_address_space(proc: Path) -> Iterator[Limit]:
    if resource is None:
        return
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return
    with suppress(OSError):
        taken = int((proc / "self/statm").read_text().split()[0]) * resource.getpagesize()
        yield f"process {os.getpid()}", max(0, most - taken)
