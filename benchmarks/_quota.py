"""Processes that may run a part of the time only, like slower devices (Linux, as root)."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 10_000  # short beside what a stage takes, so that waiting saves up nothing
V2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
ROOT = Path("/sys/fs/cgroup" if V2 else "/sys/fs/cgroup/cpu")


@contextmanager
def quota(name: str, share: float, period_us: int = PERIOD_US) -> Iterator[Path]:
    """A control group whose processes have this share of one processor together.

    Raises:
        OSError: this process may not make one.
    """
    group, allowed = ROOT / name, int(share * period_us)
    group.mkdir(exist_ok=True)
    if V2:
        (group / "cpu.max").write_text(f"{allowed} {period_us}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(allowed))
    try:
        yield group
    finally:
        deadline = time.monotonic() + 30  # a worker ends after the process that started it
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


def join(group: Path, pid: int | None = None) -> None:
    """Put a process into the group; this one, if none is named."""
    (group / "cgroup.procs").write_text(str(pid or os.getpid()))
