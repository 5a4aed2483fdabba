"""A process joins the others once, and again only where something has changed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ports import free_port

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.errors import HybridError, RemoteError
from lightning_hybrid.planning.run_cluster import Cluster, make_cluster
from lightning_hybrid.process import joining
from lightning_hybrid.process.children import Children
from lightning_hybrid.process.joining import (
    Everyone,
    Joined,
    Meeting,
    _end,
    forget,
    join,
    meet_all,
    reach,
)
from lightning_hybrid.profiling.device_speed import describe_device

CPU = torch.device("cpu")
SECONDS = timedelta(seconds=30)
HERE = Meeting("127.0.0.1", 0, 1, serve=True)


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has joined nobody; the store is one of this process alone."""
    process: Any = joining._Process
    fresh = {
        "store": dist.HashStore(),
        "everyone": None,
        "joined": None,
        "key": (),
        "failed": False,
    }
    for name, value in fresh.items():
        monkeypatch.setattr(process, name, value)
    yield
    if process.joined is not None:
        process.joined.mesh.shutdown()
    if process.everyone is not None:
        process.everyone.world.close()


def gathered(meeting: Meeting = HERE, size: int = 1) -> Everyone:
    everyone = reach(Coordinates(0, 1, size), meeting)
    if not everyone.world.is_open:
        meet_all(everyone)
    return everyone


def joined(survey: Callable[[Any], Cluster] | None = None, **how: Any) -> Joined:
    usual = {"backend": "gloo", "timeout": SECONDS, "device": CPU}
    return join(gathered(), Coordinates(0, 1, 1), survey=survey, **(usual | how))


def test_a_second_run_of_the_same_sizes_uses_the_same_groups() -> None:
    assert joined() is joined()


@pytest.mark.parametrize(
    "how", [{"timeout": 2 * SECONDS}, {"capacity": (1.0,)}, {"device": torch.device("cpu", 0)}]
)
def test_another_setting_makes_new_groups(how: dict[str, Any]) -> None:
    first = joined()
    second = joined(**how)
    assert second is not first
    with pytest.raises(RuntimeError, match="has left the run"):
        first.mesh.control.size()
    assert second.mesh.control.size() == 1


@pytest.fixture
def made_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    """A default group of this process alone, with a store at the port where ranks would meet."""
    monkeypatch.setattr(joining._Process, "store", None)
    monkeypatch.setattr(joining.atexit, "register", lambda *_: None)
    port = free_port()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield Meeting("127.0.0.1", port, 1, serve=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_default_group_of_all_ranks_is_closed_when_they_have_met(made_before: Meeting) -> None:
    assert gathered(made_before).world.size() == 1
    assert not dist.is_initialized()


def test_a_default_group_of_others_is_refused(made_before: Meeting) -> None:
    with pytest.raises(HybridError, match="has 1 ranks, and this run 2 processes"):
        reach(Coordinates(0, 1, 2), made_before)


def test_all_ranks_meet_once_whatever_the_sizes() -> None:
    everyone = gathered()
    first, second = joined(), joined(capacity=(1.0,))
    assert first is not second
    assert first.mesh.world is second.mesh.world is everyone.world is gathered().world
    assert everyone.world.size() == 1


def test_a_rank_that_has_not_caught_a_failure_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered()
    forget()
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    monkeypatch.setattr(Children, "processes", [ended])
    monkeypatch.setattr(Children, "failed", "Local")
    with pytest.raises(RemoteError, match="did not catch the Local of an earlier run"):
        gathered(size=2)


def test_a_run_that_follows_a_failure_makes_new_groups() -> None:
    first = joined()
    forget()
    second = joined()
    assert second is not first
    with pytest.raises(RuntimeError, match="has left the run"):
        first.mesh.world.size()
    assert second.mesh.world.size() == 1


def test_devices_are_looked_at_once_and_decide_who_stands_where() -> None:
    looks = []

    def survey(world: Any) -> Cluster:
        looks.append(world.size())
        return replace(make_cluster([describe_device(CPU, (0.0, 0.0))], 1, 1, (1.0,)), order=(0,))

    first = joined(survey)
    assert joined(survey) is first
    assert looks == [1]
    assert first.cluster is not None
    assert first.mesh.coordinates.order == (0,)
    assert joined().cluster is None


def test_at_the_end_of_a_process_its_groups_are_closed() -> None:
    everyone, mesh = gathered(), joined().mesh
    _end()
    for group in (mesh.control, mesh.data_parallel, everyone.world):
        with pytest.raises(RuntimeError, match="has left the run"):
            group.size()
    _end()  # of a process that has joined nobody
