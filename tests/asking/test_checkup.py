import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hybrid.asking.doctor import Checkup, Facts
from lightning_hybrid.comm.link_probe import PairProbe, Spread
from lightning_hybrid.planning.cluster_description import ClusterDescription
from lightning_hybrid.planning.run_cluster import Device

ROOT = Path(__file__).parents[2]


def spread(value: float) -> Spread:
    return Spread(median=value, least=value / 2, most=value * 2)


def facts(host: str, flops: float = 1e9, **changes: object) -> Facts:
    device = Device(
        host=host,
        name="cpu",
        memory_bytes=8_000_000_000,
        threads=1,
        units_per_s=flops,
        units_per_own_s=flops,
    )
    values = {
        "device": device,
        "versions": {"python": "3.11", "torch": "2.13"},
        "address": "10.0.0.1",
        "shared_bytes": 10,
    }
    return Facts(**(values | changes))  # type: ignore[arg-type]


def pair(one: int, other: int, bandwidth: float) -> PairProbe:
    return PairProbe(
        ranks=(one, other), latency_s=spread(1e-4), bandwidth_bytes_per_s=spread(bandwidth)
    )


def found(hosts: str, pairs: list[PairProbe], **changes: object) -> Checkup:
    return Checkup(
        facts=tuple(facts(host, **changes) for host in hosts),  # type: ignore[arg-type]
        pairs=tuple(pairs),
        all_reduce_s=spread(0.1),
    )


def test_equal_hosts_in_a_row_are_two_levels() -> None:
    pairs = [pair(0, 1, 2e9), pair(2, 3, 4e9), pair(0, 2, 1e8), pair(1, 3, 1e8)]
    cluster = found("aabb", pairs).cluster("two")
    assert [(level.name, level.devices) for level in cluster.levels] == [
        ("within a host", 2),
        ("between hosts", 4),
    ]
    assert [level.bandwidth_bytes_per_s for level in cluster.levels] == [3e9, 1e8]
    assert {device.memory_bytes for device in cluster.devices} == {4e9}
    text = cluster.to_yaml()
    assert ClusterDescription.from_yaml(text).to_yaml() == text


def test_hosts_of_unequal_numbers_are_one_level() -> None:
    pairs = [pair(0, 1, 2e9), pair(0, 2, 1e8)]
    assert [level.devices for level in found("aab", pairs).cluster("odd").levels] == [3]
    assert found("a", []).cluster("one").levels == ()


def test_nearly_equal_devices_count_as_equal() -> None:
    near = Checkup(facts=(facts("a", 1e9), facts("a", 0.9e9)), pairs=(pair(0, 1, 1e9),),
                   all_reduce_s=None)  # fmt: skip
    assert near.cluster("x").relative_speeds == (1.0, 1.0)
    far = Checkup(facts=(facts("a", 1e9), facts("a", 0.5e9)), pairs=(pair(0, 1, 1e9),),
                  all_reduce_s=None)  # fmt: skip
    assert far.cluster("x").relative_speeds == (1.0, 0.5)


def test_what_differs_is_said() -> None:
    odd = Checkup(
        facts=(
            facts("a"),
            facts("b", versions={"python": "3.12", "torch": "2.13"}, address="127.0.0.1"),
        ),
        pairs=(),
        all_reduce_s=None,
    )
    lines = odd.disagreements()
    assert lines[0] == "python: rank 0 has 3.11, rank 1 has 3.12"
    assert "rank 1 reaches the main host over loopback" in lines[1]
    assert len(lines) == 2
    assert found("ab", []).disagreements() == []


@pytest.mark.conformance
@pytest.mark.distributed
def test_two_processes_measure_each_other(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [sys.executable, "-m", "lightning_hybrid", "doctor", "--processes", "2", "--out",
         str(tmp_path / "here.yaml")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "All ranks reach each other" in result.stdout
    cluster = ClusterDescription.load(tmp_path / "here.yaml")
    assert len(cluster.devices) == cluster.levels[0].devices == 2
    assert cluster.levels[0].bandwidth_bytes_per_s > 1e6
