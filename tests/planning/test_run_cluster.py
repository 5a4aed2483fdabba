from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.run_cluster import (
    COMMUNICATOR_BYTES,
    Device,
    average_equal_devices,
    equal_devices_differ,
    given_speeds,
    make_cluster,
    measured_speeds,
    order_ranks,
)


def gpus(*rates: float) -> list[Device]:
    return [
        Device(host="a", name="H200", memory_bytes=80, units_per_s=rate, units_per_own_s=rate)
        for rate in rates
    ]


def cpus(rates: Sequence[float], own: float = 100.0, **changes: Any) -> list[Device]:
    values: dict[str, Any] = {"host": "a", "memory_bytes": 80, "cores": (0, 1, 2, 3), "threads": 1}
    return [
        Device(name="cpu", units_per_s=rate, units_per_own_s=own, **(values | changes))
        for rate in rates
    ]


def test_speeds_are_relative_to_the_first_device() -> None:
    assert measured_speeds(gpus(200, 100, 400)) == (1.0, 0.5, 2.0)


def test_a_slowed_driver_is_slower_than_the_profile_it_makes() -> None:
    # the profile counts seconds on the processor: of those rank 0 gets half as many
    assert measured_speeds(cpus([50, 100])) == (0.5, 1.0)


def test_noise_makes_no_difference() -> None:
    assert measured_speeds(cpus([97, 88, 101, 93])) == (0.95, 0.95, 0.95, 0.95)
    assert measured_speeds(gpus(100, 98, 101, 99)) == (1.0, 1.0, 1.0, 1.0)
    assert measured_speeds(cpus([97, 49, 101, 51])) == measured_speeds(cpus([99, 52, 98, 48]))


def test_ranks_that_share_too_few_cores_are_equal() -> None:
    assert measured_speeds(cpus([100, 50, 50], cores=(0, 1))) == (0.65, 0.65, 0.65)
    apart = cpus([100], cores=(0,)) + cpus([50], cores=(1,))
    assert measured_speeds(apart) == (1.0, 0.5)


def test_devices_that_should_be_equal_are_unless_a_long_look_confirms_that_they_are_not() -> None:
    first, calm, slow = cpus([165, 55]), cpus([110, 85]), cpus([100, 50])
    assert equal_devices_differ(first)
    assert len(set(measured_speeds(average_equal_devices(calm)))) == 1
    assert measured_speeds(average_equal_devices(slow)) == (1.0, 0.5)


def test_devices_that_need_not_be_equal_are_what_they_were_measured_as() -> None:
    differences: list[dict[str, Any]] = [{"host": "b"}, {"cores": (7,)}, {"threads": 4}]
    for different in differences:
        slow = replace(cpus([50])[0], **different)
        assert not equal_devices_differ([*cpus([100]), slow])
    assert not equal_devices_differ(cpus([100, 90]))  # that is noise


def test_a_short_look_is_not_enough_for_twins_that_differ() -> None:
    assert equal_devices_differ(cpus([100, 50]))
    assert not equal_devices_differ(cpus([100, 90]))
    assert not equal_devices_differ([*cpus([100]), replace(cpus([50])[0], host="b")])
    assert measured_speeds(average_equal_devices(cpus([100, 50]))) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("speeds", "replicas", "stages", "order"),
    [
        ([1, 1, 1, 1], 2, 2, (0, 1, 2, 3)),
        ([1, 1, 0.5, 0.5], 2, 2, (0, 2, 1, 3)),
        ([0.5, 1, 1, 0.5], 2, 2, (0, 1, 3, 2)),
        ([1, 0.5, 1, 0.5], 2, 2, (0, 1, 2, 3)),
        ([1, 0.5, 0.25], 1, 3, (0, 1, 2)),
        ([1, 0.98, 0.97, 1], 2, 2, (0, 1, 2, 3)),  # not worth it
    ],
)
def test_replicas_of_a_stage_are_on_similar_devices(
    speeds: list[float], replicas: int, stages: int, order: tuple[int, ...]
) -> None:
    assert order_ranks(speeds, replicas, stages) == order


@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=4, max_size=6))
def test_no_other_order_does_more(speeds: list[float]) -> None:
    replicas, stages = 2, len(speeds) // 2
    speeds = speeds[: replicas * stages]

    def together(order: Sequence[int]) -> float:
        return sum(min(speeds[rank] for rank in order[k::stages]) for k in range(stages))

    found = order_ranks(speeds, replicas, stages)
    assert sorted(found) == list(range(len(speeds)))
    assert found[0] == 0
    best = max(together(order) for order in permutations(range(len(speeds))))
    assert together(found) >= best / 1.05


def test_a_cluster_has_the_speed_and_the_memory_of_the_least_of_the_replicas() -> None:
    devices = [
        Device(host=host, name="cpu", memory_bytes=memory, threads=1, cores=(0,))
        for host, memory in (("a", 60), ("a", 60), ("b", 90), ("c", 50))
    ]
    cluster = make_cluster(devices, 2, 2, [2, 2, 1, 1])
    assert cluster.speeds == (1.0, 1.0, 0.5, 0.5)
    assert cluster.order == (0, 2, 1, 3)
    assert cluster.capacities == (1.0, 0.5)
    assert cluster.memory_bytes == (30, 30, 90, 50)  # two share host a
    assert cluster.memory_limits == (30, 50)


def test_the_memory_of_gpus_is_not_shared_and_may_be_unknown() -> None:
    large = [replace(device, memory_bytes=80 * 2**30) for device in gpus(1, 1, 1, 1)]
    # NCCL's communicators come later: two on each of two edges, two with the other replicas
    chain, both = make_cluster(large[:2], 1, 2, None), make_cluster(large, 2, 2, None)
    assert chain.memory_limits == (80 * 2**30 - 4 * COMMUNICATOR_BYTES,) * 2
    assert both.memory_limits == (80 * 2**30 - 6 * COMMUNICATOR_BYTES,) * 2
    assert make_cluster(large[:1], 1, 1, None).memory_limits == (80 * 2**30,)
    unknown = [Device(host="a", name="cpu", memory_bytes=None, threads=1)] * 2
    assert make_cluster(unknown, 1, 2, [1, 1]).memory_limits is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], r"has 1 entries \[1.0\], and there are 2 devices"),
        ([1.0, 0.0], r"capacity\[1\]=0.0, the relative speed of rank 1"),
        ([-1, 1.0], r"capacity\[0\]=-1"),
        ([1.0, float("nan")], r"capacity\[1\]=nan"),
        ([1.0, "fast"], r"capacity\[1\]='fast'"),
    ],
)
def test_wrong_speeds_are_refused_with_their_place(values: list[Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        given_speeds(values, 2)
