from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.cluster_description import SHIPPED, ClusterDescription
from lightning_hybrid.planning.units import parse, spell

SHIPPED_NAMES = ["8x8-a100", "cpu-processes", "dgx-h100", "p3.16xlarge", "workstation"]


def text(**changes: Any) -> str:
    record: dict[str, Any] = {
        "name": "small",
        "devices": [
            {"name": "A", "count": 2, "compute": "2 TFLOP/s", "memory": "16 GB"},
            {"name": "B", "count": 2, "compute": "1 TFLOP/s", "memory": "8 GB"},
        ],
        "levels": [
            {"name": "bus", "devices": 2, "bandwidth": "10 GB/s", "latency": "1 us"},
            {"name": "net", "devices": 4, "bandwidth": "8 Gbit/s", "latency": "1 ms"},
        ],
    }
    return str(yaml.safe_dump(record | changes))


def test_quantities_are_read_in_base_units() -> None:
    cluster = ClusterDescription.from_yaml(text())
    assert [device.name for device in cluster.devices] == ["A", "A", "B", "B"]
    assert cluster.relative_speeds == (1.0, 1.0, 0.5, 0.5)
    assert cluster.memory_limits == (16e9, 16e9, 8e9, 8e9)
    net = cluster.levels[1]
    assert (net.bandwidth_bytes_per_s, net.latency_s) == (1e9, 1e-3)


def test_a_link_is_that_of_the_innermost_level_that_joins_the_devices() -> None:
    cluster = ClusterDescription.from_yaml(text())
    names = {pair: cluster.level(pair) for pair in [(0, 1), (1, 2), (3, 2), (0, 3)]}
    assert [level.name for level in names.values() if level] == ["bus", "net", "bus", "net"]
    assert cluster.level([1]) is None


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_every_shipped_description_is_read_and_survives_being_written(name: str) -> None:
    cluster = ClusterDescription.load(name)
    assert cluster.name == name
    assert cluster.about
    assert ClusterDescription.from_yaml(cluster.to_yaml()) == cluster


def test_all_shipped_files_are_known_here() -> None:
    assert sorted(path.stem for path in SHIPPED.iterdir()) == SHIPPED_NAMES


def test_fewer_devices_keep_the_levels_that_join_them() -> None:
    cluster = ClusterDescription.load("8x8-a100")
    assert [level.name for level in cluster.take(8).levels] == ["NVLink"]
    assert [level.name for level in cluster.take(9).levels] == ["NVLink", "Ethernet"]
    assert len(cluster.take(9).devices) == 9
    with pytest.raises(PlanError, match="has 64 devices, 65 are asked for"):
        cluster.take(65)


def test_unknown_memory_is_no_limit() -> None:
    assert ClusterDescription.load("cpu-processes").memory_limits is None


@pytest.mark.parametrize(
    ("quantity", "written", "value"),
    [
        ("memory", "16 GiB", 16 * 2**30),
        ("memory", "80GB", 80e9),
        ("compute", "1.5e1 TFLOP/s", 15e12),
        ("bandwidth", "100 Gbit/s", 12.5e9),
        ("latency", "0 s", 0.0),
        ("latency", "3 µs", 3e-6),
    ],
)
def test_units(quantity: str, written: str, value: float) -> None:
    assert parse(quantity, written, "here") == pytest.approx(value)
    assert parse(quantity, spell(quantity, value), "here") == pytest.approx(value)


@pytest.mark.parametrize(
    ("quantity", "written", "message"),
    [
        (
            "memory",
            16,
            "here is 16, which is no memory: write a number and its unit, such as '16 GB'",
        ),
        (
            "bandwidth",
            "25 GHz",
            "'25 GHz', which is no bandwidth: .* such as '25 GB/s' or '100 Gbit/s'",
        ),
        ("compute", "much", "here is 'much', which is no compute"),
        ("compute", "1.2.3 TFLOP/s", "which is no compute"),
        ("latency", "-1 us", "here is '-1 us'"),
        ("bandwidth", "0 GB/s", "of more than 0 is needed"),
    ],
)
def test_wrong_quantities_are_named(quantity: str, written: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse(quantity, written, "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, "the cluster has the unknown field 'colour'"),
        ({"devices": [{"name": "A", "memry": "1 GB"}]}, r"devices\[0\].*did you mean 'memory'"),
        ({"devices": [{"count": 2}]}, r"devices\[0\] lacks 'name', 'compute'"),
        (
            {"devices": [{"name": "A", "compute": 3e12}]},
            r"devices\[0\].compute .* write a number and its unit",
        ),
        (
            {"devices": [{"name": "A", "compute": "1 FLOP/s", "count": 0}]},
            r"devices\[0\].count is 0",
        ),
        ({"devices": []}, "has no devices"),
        ({"devices": 3}, "devices is 3: a list is needed"),
        ({"levels": [{"name": "bus", "devices": 4}]}, r"levels\[0\] lacks 'bandwidth', 'latency'"),
        ({"levels": []}, "joins all of its 4 devices"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ClusterDescription.from_yaml(text(**changes))


def test_levels_that_contradict_each_other_are_refused() -> None:
    level = {"name": "bus", "bandwidth": "1 GB/s", "latency": "1 us"}
    levels = [level | {"devices": 3}, level | {"devices": 4}]
    with pytest.raises(PlanError, match="joins 4 devices, which is no multiple of the 3"):
        ClusterDescription.from_yaml(text(levels=levels))


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text())
    assert ClusterDescription.load(tmp_path / "mine.yaml").name == "small"
    (tmp_path / "mine.yaml").write_text("a: [")
    with pytest.raises(PlanError, match=r"mine\.yaml: the cluster is not YAML"):
        ClusterDescription.load(tmp_path / "mine.yaml")
    with pytest.raises(PlanError, match=r"'nowhere'.*descriptions: 8x8-a100, cpu-processes"):
        ClusterDescription.load("nowhere")
