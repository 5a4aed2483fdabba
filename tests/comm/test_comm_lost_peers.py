"""A lost peer and a late one are told apart, and from errors that are neither."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from prepared import prepared

from lightning_hybrid.comm.collectives import meet
from lightning_hybrid.comm.connections import ConnectionLost, start, wait
from lightning_hybrid.comm.travelling_errors import is_gone, is_late

ZERO = torch.zeros(1)

NCCL_GONE = (
    "NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error, "
    "NCCL version 2.27.5"
)
NCCL_LATE = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, "
    "NumelIn=4, NumelOut=4, Timeout(ms)=5000) ran for 5027 milliseconds before timing out."
)


def peer(folder: str, how: str) -> None:
    """The other rank: it meets this one once, and then ends or stays away."""
    groups = make_groups(Path(folder), 1)
    meet(groups[0])
    if how == "gone":
        os._exit(0)
    time.sleep(120)


def make_groups(folder: Path, rank: int) -> list[Any]:
    store = dist.FileStore(str(folder / "store"), 2)
    store.set(f"rank {rank}", "")
    store.wait(["rank 0", "rank 1"], timedelta(minutes=2))
    prefixes = [dist.PrefixStore(name, store) for name in "ab"]
    return [dist.ProcessGroupGloo(prefix, rank, 2, timedelta(seconds=5)) for prefix in prefixes]


@pytest.mark.distributed
@pytest.mark.conformance
@pytest.mark.parametrize("how", ["gone", "late"])
def test_gloo_is_understood(tmp_path: Path, how: str) -> None:
    _, other_rank = prepared()
    process = other_rank.start(
        [__file__, str(tmp_path), how],
        env=os.environ | {"PYTHONPATH": ""},
        cwd=tmp_path,
        output=tmp_path / "output.txt",
    )
    group, other = make_groups(tmp_path, 0)
    meet(group)
    for begin in (partial(group.recv, [torch.zeros(1)], 1, 0), partial(other.allreduce, [ZERO])):
        with pytest.raises(RuntimeError) as raw:
            begin().wait()
        assert (is_gone(raw.value), is_late(raw.value)) == (how == "gone", how == "late")
    # what starts afterwards fails at once, and says who is gone
    for begin in (partial(group.send, [ZERO], 1, 0), partial(group.broadcast, [ZERO])):
        with pytest.raises(ConnectionLost, match="Lost rank 1") as ours:
            wait(start(begin, peer="rank 1"), "rank 1")
        assert ours.value.peer == "rank 1"
    process.kill()


def test_nccl_is_understood() -> None:
    assert is_gone(dist.DistBackendError(NCCL_GONE))
    assert is_late(dist.DistBackendError(NCCL_LATE))


def test_the_error_of_a_store_whose_host_is_gone_is_recognised() -> None:
    script = "import time; from torch.distributed import TCPStore; "
    script += "s = TCPStore('127.0.0.1', 0, None, True); print(s.port, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), None, False)
        host.kill()

    def ask() -> None:
        for _ in range(3):  # the first requests may still be sent
            store.check(["key"])

    with pytest.raises(RuntimeError) as raw:
        ask()
    assert is_gone(raw.value)


@pytest.mark.parametrize("text", ["mat1 and mat2 shapes cannot be multiplied", "CUDA error", ""])
def test_errors_of_users_are_neither(text: str) -> None:
    assert not is_gone(RuntimeError(text))
    assert not is_late(RuntimeError(text))
    assert not is_gone(ValueError("Connection closed by peer"))


if __name__ == "__main__":
    peer(*sys.argv[1:])
