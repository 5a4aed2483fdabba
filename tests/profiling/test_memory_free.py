"""The memory of a process is what the tightest of its limits leaves."""

import resource
from pathlib import Path

import pytest

from lightning_hybrid.planning.run_cluster import Device, memory_of_rank
from lightning_hybrid.profiling.memory_free import (
    free_bytes,
    free_of_host,
    host_bytes,
    memory_limits,
)

MB = 10**6


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    write(folder, meminfo="MemTotal: 9000 kB\nMemAvailable: 2000 kB\n")
    write(folder / "self", statm="10 5 1 1 0 1 0")
    return folder


def test_every_group_up_to_the_root_counts(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write(proc / "self", cgroup="0::/job/step\n")
    write(groups / "job/step", memory__max="max", memory__current="1")
    write(groups / "job", memory__max=f"{100 * MB}", memory__current=f"{60 * MB}")
    write(groups, memory__max=f"{500 * MB}", memory__current=f"{80 * MB}")
    found = dict(memory_limits(proc, groups))
    assert found == {str(groups / "job"): 40 * MB, str(groups): 420 * MB}


def test_groups_of_the_first_version_count(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write(proc / "self", cgroup="4:memory:/a\n3:cpuset:/\n0::/\n")
    limits = {"memory__limit_in_bytes": f"{90 * MB}", "memory__usage_in_bytes": f"{80 * MB}"}
    write(groups / "memory/a", **limits, memory__stat=f"total_inactive_file {30 * MB}\ncache 1")
    write(groups / "memory", memory__limit_in_bytes=f"{2**63 - 4096}", memory__usage_in_bytes="0")
    assert dict(memory_limits(proc, groups)) == {str(groups / "memory/a"): 40 * MB}


def test_the_limit_on_address_space_counts(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50 * MB, 50 * MB))
    [(name, left)] = memory_limits(proc, tmp_path)
    assert name.startswith("process ")
    assert left == 50 * MB - 10 * resource.getpagesize()
    assert free_of_host(proc, tmp_path) == 2000 * 1024  # other processes have one of their own


def test_a_system_that_says_nothing_has_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path, tmp_path) == ()
    assert host_bytes(tmp_path) is None


def test_what_is_free_is_what_the_tightest_limit_leaves(proc: Path, tmp_path: Path) -> None:
    assert free_bytes(proc, tmp_path) == 2_048_000
    write(proc / "self", cgroup="0::/job\n")
    write(tmp_path / "cgroup/job", memory__max=f"{MB}", memory__current="0")
    assert free_bytes(proc, tmp_path / "cgroup") == MB


def test_ranks_share_what_has_the_same_name_on_their_host(proc: Path) -> None:
    assert host_bytes(proc) == 2_048_000

    def rank(host: str, *limits: tuple[str, int]) -> Device:
        return Device(host=host, name="cpu", memory_bytes=900, memory_limits=limits, threads=1)

    devices = [
        rank("a", ("job", 400), ("process 1", 250)),
        rank("a", ("job", 400), ("process 2", 150)),
        rank("b", ("job", 400)),
    ]
    assert [memory_of_rank(device, devices) for device in devices] == [200, 150, 400]
