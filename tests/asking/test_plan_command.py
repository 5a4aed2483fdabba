"""What the command shows of a plan that was made elsewhere."""

from dataclasses import replace

from planned import made_plan

from lightning_hybrid.asking.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.asking.plan_command import with_limits
from lightning_hybrid.planning.plan import Plan


def cluster(*gigabytes: float) -> ClusterDescription:
    devices = tuple(DeviceSpec(name="d", flops_per_s=1.0, memory_bytes=g * 1e9) for g in gigabytes)
    level = Level(name="h", devices=len(devices), bandwidth_bytes_per_s=1e9, latency_s=0.0)
    return ClusterDescription(name="c", devices=devices, levels=(level,))


def shown(plan: Plan, *gigabytes: float) -> list[tuple[float, float]]:
    rows = with_limits(plan, cluster(*gigabytes)).rows
    return [((row.peak_bytes or 0) / 1e9, (row.limit_bytes or 0) / 1e9) for row in rows]


def test_memory_is_that_of_all_stages_of_a_device() -> None:
    held = made_plan(schedule="looped", memory_bytes=[7e9] * 4)
    assert len(held.rows) == 4
    assert shown(held, 16.0, 24.0) == [(14.0, 24.0), (14.0, 16.0)] * 2


def test_the_limit_is_that_of_the_smallest_device_with_a_copy() -> None:
    copies = replace(made_plan(memory_bytes=[7e9] * 4), devices=((1, 2), 0), capacities=(1.0,) * 3)
    assert shown(copies, 16.0, 24.0, 8.0) == [(14.0, 8.0), (14.0, 16.0)]
