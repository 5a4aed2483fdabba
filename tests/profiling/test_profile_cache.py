import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from capturing import graph_of
from torch import Tensor, nn

from lightning_hybrid.graph import NetworkGraph, network_partitions
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.profiling.network_table import count
from lightning_hybrid.profiling.profile_cache import _write, cache_folder, cached

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_HYBRID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


class Counter:
    """Asks for the profile of a network and counts how often it was measured."""

    def __init__(self) -> None:
        self.measured = 0

    def __call__(self, network: nn.Module, x: Tensor) -> PartitionTable:
        return self.of(graph_of(network, x), x)

    def usual(self) -> PartitionTable:
        return self.of(usual(), X)

    def of(self, graph: NetworkGraph, x: Tensor) -> PartitionTable:
        partitions = network_partitions(graph)

        def measured() -> PartitionTable:
            self.measured += 1
            return replace(count(graph, partitions), device="cpu")

        return cached(measured, graph, partitions, [x], CPU)


def network(width: int = 8, **changes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(2, width, 3, padding=1, **changes), nn.Conv1d(width, 2, 1))


X = torch.ones(2, 2, 5)


@cache
def usual() -> NetworkGraph:
    """Captured once, where nothing depends on it."""
    return graph_of(network(), X)


def test_a_profile_is_measured_once(folder: Path) -> None:
    profile = Counter()
    assert profile(network(), X) == profile(network(), X)
    assert profile.measured == 1
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_training_and_evaluation_share_a_profile(folder: Path) -> None:
    profile = Counter()
    profile(network().train(), X)
    profile(network().eval(), X)
    assert profile.measured == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda profile: profile(network(width=16), X),
        lambda profile: profile(network(groups=2), X),
        lambda profile: profile(network().double(), X.double()),
        lambda profile: profile(network(), torch.ones(4, 2, 5)),
        lambda profile: profile(network(), torch.ones(2, 2, 7)),
        lambda profile: profile(network().requires_grad_(False), X),
        lambda profile: profile(nn.Sequential(*network(), nn.ReLU()), X),
    ],
)
def test_what_differs_is_measured_anew(
    folder: Path, other: Callable[[Counter], PartitionTable]
) -> None:
    profile = Counter()
    profile.usual()
    other(profile)
    assert profile.measured == 2


def test_another_number_of_threads_device_or_version_is_measured_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Counter()
    profile.usual()
    place = "lightning_hybrid.profiling.profile_cache"
    with monkeypatch.context() as patch:
        patch.setattr("torch.get_num_threads", lambda: 7)
        profile.usual()
    with monkeypatch.context() as patch:
        patch.setattr(f"{place}._processor", lambda: "another processor")
        profile.usual()
    with monkeypatch.context() as patch:
        patch.setattr(f"{place}._version", lambda package: "9.9")
        profile.usual()
    with torch.autocast("cpu", torch.bfloat16):
        profile.usual()
    assert profile.measured == 5


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"forward_s": [3]}',
        "\x00\xff",
        *(
            '{"names": ["a", "b"], "forward_s": [1, 1], "cut_bytes": [1], "backward_s": [1, '
            f"{n}]}}"
            for n in ("NaN", "Infinity", "-1", "1e999", '"1"', "null")
        ),
    ],
)
def test_a_broken_file_is_measured_and_written_anew(folder: Path, broken: str) -> None:
    profile = Counter()
    first = profile.usual()
    (file,) = folder.iterdir()
    file.write_text(broken)
    assert profile.usual() == first
    assert profile.measured == 2
    assert PartitionTable.from_record(json.loads(file.read_text())) == first


def test_without_a_place_to_write_all_works_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LIGHTNING_HYBRID_CACHE", str(tmp_path / "file"))
    profile = Counter()
    profile.usual()
    profile.usual()
    assert profile.measured == 2


def test_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HYBRID_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("LIGHTNING_HYBRID_CACHE")
    assert cache_folder() == Path("/xdg/lightning_hybrid")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "lightning_hybrid"


def write_often(file: Path, letter: str) -> None:
    for _ in range(300):
        _write(file, {"text": [letter] * 2000})


@pytest.mark.conformance
def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    file, fork = tmp_path / "profiles" / "one.json", get_context("fork")
    writers = [fork.Process(target=write_often, args=(file, letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        if file.exists():
            assert len(json.loads(file.read_text())["text"]) == 2000
            seen += 1
    assert seen
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert list(file.parent.iterdir()) == [file]
