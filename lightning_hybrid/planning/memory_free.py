"""How much memory a process may still take: of its host, and within its limits.

Limits are those of the groups (cgroups of Linux, both versions) from the one that the process is in
up to the root, each of which may have one, and that on its address space (``ulimit -v``).
"""

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
"""Whose it is, and bytes that are left. Processes of a host that name the same one share it."""

_FILES = {
    # the plain counters of version 1 leave out the groups below; those of version 2 do not
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def host_bytes(proc: Path = Path("/proc")) -> int | None:
    """Bytes that processes of this host may still take together; ``None``: it does not say."""
    with suppress(OSError):
        for line in (proc / "meminfo").read_text().splitlines():
            # with the caches that the system gives up on demand; MemFree leaves them out
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def memory_limits(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[Limit, ...]:
    """The limits of this process.

    Args:
        proc: where Linux tells of processes.
        cgroups: where it tells of groups.
    """
    return (*_of_groups(proc, cgroups), *_of_address_space(proc))


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take, alone on its host; ``None``: nothing is known."""
    host, limits = host_bytes(proc), [left for _, left in memory_limits(proc, cgroups)]
    return min(limits if host is None else [host, *limits], default=None)


def free_on(device: torch.device) -> int | None:
    """Bytes that this process may still take on its device; ``None``: nothing is known."""
    return free_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def free_of_host(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process and others of its group may still take together; ``None``: unknown.

    A limit on the address space is each process's own.
    """
    host, groups = host_bytes(proc), [left for _, left in _of_groups(proc, cgroups)]
    return min(groups if host is None else [host, *groups], default=None)


def free_addresses(proc: Path = Path("/proc")) -> int | None:
    """Bytes that this process may still map; ``None``: there is no limit."""
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
        # from inside of a container the path may be that of the host, and the root is its own group
        for root in roots:
            for place in dict.fromkeys(root / part for part in (path, *path.parents)):
                with suppress(OSError, ValueError):  # no such file, or "max"
                    most = int((place / limit).read_text())
                    free = most - int((place / used).read_text()) + _cached(place, prefix)
                    if most < 2**60:  # what stands there for no limit in version 1
                        yield str(place), max(0, min(free, most))


def _cached(place: Path, prefix: str) -> int:
    """What counts as used and is given back where it is needed: pages of files."""
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
