"""A started rank ends with the process that has started it, until they have met."""

import os
import signal
import subprocess
import time
from pathlib import Path

from lightning_hybrid.process.children import have_met, keep_ranks


def child_lives_on(folder: Path, *, met: bool, stderr: int = 2) -> bool:
    """Kill a process that has started a rank. Returns whether that one is there afterwards.

    Args:
        folder: an empty one.
        met: whether they have met.
        stderr: file of the process, which is closed here before the kill if it is another one.
    """
    told = folder / "pid"
    parent = os.fork()
    if parent == 0:
        os.dup2(stderr, 2)
        child = subprocess.Popen(["sleep", "60"])  # as one that imports: it looks at nothing
        keep_ranks([child])
        if met:
            have_met()
        (folder / "part").write_text(str(child.pid))
        (folder / "part").rename(told)
        time.sleep(60)
        os._exit(0)
    deadline = time.monotonic() + 30
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(told.read_text())
    if stderr != 2:
        os.close(stderr)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + (2 if met else 30)
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    lives = Path(f"/proc/{pid}/exe").exists()
    if lives:
        os.kill(pid, signal.SIGKILL)
    return lives


def test_a_rank_that_has_met_nobody_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    assert not child_lives_on(tmp_path, met=False)


def test_a_rank_that_has_met_the_others_may_outlive_it(tmp_path: Path) -> None:
    assert child_lives_on(tmp_path, met=True)


def test_it_ends_too_where_nobody_reads_what_is_said_of_it(tmp_path: Path) -> None:
    # as of a script that `subprocess.run(..., capture_output=True, timeout=...)` has killed
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    os.close(reads)
    assert not child_lives_on(tmp_path, met=False, stderr=writes)
