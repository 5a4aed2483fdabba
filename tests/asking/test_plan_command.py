"""What the command shows of a plan that was made elsewhere."""

from dataclasses import replace

import pytest
from planned import made_plan

from lightning_hybrid.asking.plan_command import with_limits
from lightning_hybrid.planning.arrangements import Arrangement, Arrangements
from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.plan_page import plan_page, predicted_lanes
from lightning_hybrid.planning.shapes import Shape, plans_of


def cluster(*gigabytes: float) -> ClusterDescription:
    devices = tuple(DeviceSpec(name="d", flops_per_s=1.0, memory_bytes=g * 1e9) for g in gigabytes)
    level = Level(name="h", devices=len(devices), bandwidth_bytes_per_s=1e9, latency_s=0.0)
    return ClusterDescription(name="c", devices=devices, levels=(level,))


def shown(plan: Plan, *gigabytes: float) -> list[tuple[float, float]]:
    rows = with_limits([plan] * plan.replicas, cluster(*gigabytes)).rows
    return [((row.peak_bytes or 0) / 1e9, (row.limit_bytes or 0) / 1e9) for row in rows]


def test_memory_is_that_of_all_stages_of_a_device() -> None:
    held = made_plan(schedule="looped", memory_bytes=[7e9] * 4)
    assert len(held.rows) == 4
    assert shown(held, 16.0, 24.0) == [(14.0, 24.0), (14.0, 16.0)] * 2


def test_the_limit_is_that_of_the_smallest_device_with_a_copy() -> None:
    copies = replace(made_plan(memory_bytes=[7e9] * 4), devices=((1, 2), 0), capacities=(1.0,) * 3)
    assert shown(copies, 16.0, 24.0, 8.0) == [(14.0, 8.0), (14.0, 16.0)]


def in_shares() -> tuple[ClusterDescription, list[Plan]]:
    """Replicas of two stages on devices of 1, 0.5 and 0.25 of a speed, with a part of 36 samples.

    A sample takes 4 ms of forward on speed 1, twice that of backward, and 0.5 GB of activations.
    """
    speeds = (1.0, 1.0, 0.5, 0.5, 0.25, 0.25)
    devices = [
        DeviceSpec(name="d", flops_per_s=s, memory_bytes=(20 if s == 1 else 8) * 1e9)
        for s in speeds
    ]
    level = Level(name="h", devices=6, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    at = ClusterDescription(name="c", devices=tuple(devices), levels=(level,))
    genes = Arrangement(tuple(range(6)), 3, (1, 1), 1, 3, False, (2, 4))
    step_s, shares = Arrangements(costs_of, at, 12, [3]).timed(genes)
    shape = Shape(
        arrangement=genes, step_s=step_s, samples=36, bubble=0.0, search="given", shares=shares
    )
    return at, plans_of(shape, costs_of, at, 12)


def costs_of(samples: int) -> PartitionTable:
    return PartitionTable(
        names=tuple("abcd"),
        layers=(1,) * 4,
        parameters=(1,) * 4,
        forward_s=(1e-3 * samples,) * 4,
        backward_s=(2e-3 * samples,) * 4,
        cut_bytes=(0.0,) * 3,
        gradient_bytes=(0.0,) * 4,
        kept_bytes=(0.1e9,) * 4,
        activation_bytes=(0.125e9 * samples,) * 4,
    )


def test_what_is_shown_of_unequal_shares_is_what_each_replica_takes() -> None:
    at, plans = in_shares()
    plan, slices = with_limits(plans, at), plans[0].microbatches
    assert sum(plan.shares) == 36
    assert plan.shares[0] > plan.shares[1] > plan.shares[2]
    ends = []
    for share, speed, each in zip(plan.shares, (1.0, 0.5, 0.25), plans):
        forward_s = 2e-3 * share / slices / speed  # of two of four partitions
        assert [row.forward_s for row in each.rows] == pytest.approx([forward_s] * 2)
        ends.append((slices + 1) * 3 * forward_s)
        assert each.step_s == pytest.approx(ends[-1])
        drawn = [span.end_s for spans in predicted_lanes(each).values() for span in spans]
        assert max(drawn) == pytest.approx(ends[-1])
    assert plan.predicted_step_s == pytest.approx(max(ends))
    # of two partitions, as a device holds them; the fullest has the most of what it may hold
    held = [0.2e9 + 0.25e9 * share for share in plan.shares]
    rank = max(zip(held, (20e9, 8e9, 8e9)), key=lambda rank: rank[0] / rank[1])
    assert [(row.peak_bytes, row.limit_bytes) for row in plan.rows] == [rank] * 2
    page = plan_page(plan, replicas=plans)
    assert all(f"replica {r}, device {d}" in page for r in range(3) for d in range(2))
