from dataclasses import replace

import pytest
from planned import problem_on, simulate

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.shape_costs import links_of, ring_s
from lightning_hybrid.planning.shapes import ShapeRequest, plans_of, rank_shapes, recommended
from lightning_hybrid.schedules.gpipe import gpipe


def cluster(count: int = 4, memory: float | None = None, bandwidth: float = 1e9, hosts: int = 1):
    levels = [Level(name="in", devices=count // hosts, bandwidth_bytes_per_s=8e9, latency_s=0)]
    if hosts > 1:
        levels.append(
            Level(name="out", devices=count, bandwidth_bytes_per_s=bandwidth, latency_s=1e-3)
        )
    device = DeviceSpec(name="one", flops_per_s=1.0, memory_bytes=memory)
    return ClusterDescription(name="test", devices=(device,) * count, levels=tuple(levels))


def costs_of(samples: int) -> PartitionTable:
    """Eight equal partitions of 10 MB gradients."""
    return PartitionTable(
        names=tuple(f"layer{k}" for k in range(8)),
        layers=(1,) * 8,
        parameters=(2_500_000,) * 8,
        forward_s=(1e-3 * samples,) * 8,
        backward_s=(2e-3 * samples,) * 8,
        cut_bytes=(4_000 * samples,) * 7,
        gradient_bytes=(10_000_000,) * 8,
        kept_bytes=(40_000_000,) * 8,
        activation_bytes=(1_000_000 * samples,) * 8,
    )


def test_all_shapes_use_all_devices_and_divide_the_batch() -> None:
    shapes = rank_shapes([costs_of], cluster(4), 6)
    assert {(s.arrangement.replicas, s.arrangement.size) for s in shapes} == {
        (4, 1),
        (2, 2),
        (1, 4),
    }
    assert {s.arrangement.microbatches for s in shapes} == {1, 2, 3, 6}
    assert {s.arrangement.turns for s in shapes if s.arrangement.size == 2} == {1, 2, 3}
    # (shapes that differ by rounding alone count as equally fast)
    rates = [float(f"{s.samples_per_s:.9g}") for s in shapes]
    assert rates == sorted(rates, reverse=True)


def test_replicas_win_where_links_are_fast_and_stages_where_they_are_slow() -> None:
    assert recommended(rank_shapes([costs_of], cluster(4), 6)).arrangement.size == 1
    slow = recommended(rank_shapes([costs_of], cluster(4, bandwidth=1e7, hosts=4), 6))
    assert slow.arrangement.size > 1


def test_the_prediction_is_the_simulation_of_the_plan() -> None:
    one = cluster(4, hosts=2)
    for shape in rank_shapes([costs_of], one, 6):
        if shape.arrangement.has_copies:  # tests/planning/test_copied_shapes.py
            continue
        plan = plans_of(shape, costs_of, one, 6)[0]
        rows = plan.rows
        timeline = simulate(
            gpipe(plan.stages, plan.microbatches),
            [row.forward_s or 0 for row in rows],
            [row.backward_s or 0 for row in rows],
            devices=plan.devices,
            send_s=[row.send_s or 0 for row in rows[:-1]],
            latency_s=[row.latency_s or 0 for row in rows[:-1]],
            reduce_s=[row.reduce_s or 0 for row in rows],
        )
        assert timeline.makespan_s == pytest.approx(shape.step_s)
        assert timeline.bubble == pytest.approx(shape.bubble, abs=1e-9)
        assert plan.world_size == 4


def test_replicas_that_divide_states_fit_where_others_do_not() -> None:
    def dividing(samples: int) -> PartitionTable:
        return replace(costs_of(samples), state_bytes=(20_000_000,) * 8)

    # a device needs 400 MB with copies of gradients, and its activations; or 400 - 160 * 3/4 MB
    small = cluster(4, memory=350e6)
    for costs, fits in ((costs_of, False), (dividing, True)):
        shapes = rank_shapes([costs], small, 6, spare=0.0)
        shape = next(s for s in shapes if s.arrangement.replicas == 4)
        assert shape.fits is fits
    plan = plans_of(shape, dividing, small, 6)[0]
    assert plan.rows[0].memory_bytes == 8 * (50e6 - 20e6 * 3 / 4 + 6e6)


def test_what_does_not_fit_is_never_the_fastest() -> None:
    # a whole network needs 320 MB and its activations, half of one 160 MB
    shapes = rank_shapes([costs_of], cluster(4, memory=250e6), 6)
    best = recommended(shapes)
    assert best.arrangement.size > 1
    assert all(not shape.fits for shape in shapes if shape.arrangement.size == 1)
    whole = next(s for s in shapes if s.arrangement.size == s.arrangement.microbatches == 1)
    # with copies of the gradients, and a tenth of the memory left free
    assert whole.lacking_bytes == pytest.approx(400e6 + 48e6 - 0.9 * 250e6)


def test_activations_are_computed_again_only_where_stages_fit_in_no_other_way() -> None:
    two = cluster(2, memory=250e6)  # half the network: 160 MB, and 4 MB a sample
    best = recommended(rank_shapes([costs_of], two, 64))
    assert best.arrangement.recompute
    assert not any(s.arrangement.recompute for s in rank_shapes([costs_of], cluster(2), 64))
    made = [shape.arrangement for shape in rank_shapes([costs_of], two, 64)]
    assert all(genes.microbatches > 1 for genes in made if genes.recompute)

    def slower(samples: int) -> PartitionTable:
        return replace(costs_of(samples), backward_s=(3e-3 * samples,) * 8)

    same = [
        s
        for s in rank_shapes([slower], cluster(2), 64)
        if s.arrangement == replace(best.arrangement, recompute=False)
    ]
    assert best.step_s == pytest.approx(same[0].step_s)
    plan = plans_of(best, costs_of, two, 64)[0]
    assert plan.recompute
    assert max(row.memory_bytes for row in plan.rows) <= 250e6
    assert "computed again" in plan.describe()


def test_where_nothing_fits_the_error_says_what_lacks() -> None:
    with pytest.raises(PlanError, match=r"too small for the network.*lacks 0\.0\d+ GB.*larger"):
        recommended(rank_shapes([costs_of], cluster(4, memory=40e6), 6))
    # a chain of four: 80 MB and activations of 6 samples, of 2 with recomputation
    with pytest.raises(PlanError) as caught:
        recommended(rank_shapes([costs_of], cluster(4, memory=79e6), 6))
    text = str(caught.value)
    assert "with 4 stages, 3 micro-batches and recompute=True, device 0 lacks 0.00502 GB" in text
    assert "It would fit with 8 stages, 3 micro-batches (each on a device with 0.079 GB" in text
    assert "on 4 devices with 0.084 GB free" in text


def test_a_batch_that_cannot_be_split_has_no_micro_batches() -> None:
    shapes = rank_shapes([costs_of], cluster(4), 6, ShapeRequest(splits=lambda m: False, wide=True))
    assert {s.arrangement.microbatches for s in shapes} == {1}


def test_links_are_those_of_the_slowest_replica() -> None:
    # replicas of 3 on hosts of 2: devices 0 and 1 of the second replica are on two hosts
    links = links_of(cluster(6, hosts=3), 3)
    slow, fast = 1 / 1e9, 1 / 8e9
    assert [links.seconds_per_byte[0][k] for k in (1, 2)] == [slow, slow]
    inside = links_of(cluster(4, hosts=2), 2)
    assert inside.seconds_per_byte[0][1] == fast


def test_rings_of_the_stages_of_a_host_share_its_links() -> None:
    one = cluster(4, hosts=2)
    alone = problem_on(costs_of(6), one, 1, 1)  # one ring through all
    shared = problem_on(costs_of(6), one, 2, 1)  # two rings of two
    level = one.levels[-1]
    assert sum(alone.table.reduce_s) == pytest.approx(ring_s(level, 80e6, 4))
    assert sum(shared.table.reduce_s) == pytest.approx(ring_s(level, 80e6, 2, sharers=2))


def test_a_ring_moves_twice_what_is_not_ones_own() -> None:
    level = Level(name="l", devices=4, bandwidth_bytes_per_s=1e9, latency_s=0.0)
    assert ring_s(level, 1e9, 4) == pytest.approx(1.5)
    assert ring_s(level, 1e9, 1) == 0.0


def unlike(*speeds: float) -> ClusterDescription:
    devices = tuple(DeviceSpec(name=f"of {speed}", flops_per_s=speed) for speed in speeds)
    return replace(cluster(len(speeds)), devices=devices)


def test_replicas_on_unlike_devices_share_by_their_speed() -> None:
    [dealt] = [
        shape
        for shape in rank_shapes([costs_of], unlike(1.0, 0.5, 0.25), 28)
        if shape.shares and (shape.arrangement.replicas, shape.arrangement.microbatches) == (3, 1)
    ]
    assert dealt.shares == (48, 24, 12)
    # all three take the time of 48 samples on the first; the ring runs beside the backward
    assert dealt.step_s == pytest.approx(48 * 8 * 3e-3)
    assert dealt.bubble == pytest.approx(0)
    plan = plans_of(dealt, costs_of, unlike(1.0, 0.5, 0.25), 28)[0]
    assert plan.shares == (48, 24, 12)
    assert "shares of a batch: 48, 24, 12" in plan.describe()
    assert type(plan).from_json(plan.to_json()) == plan


def test_no_shape_is_slower_than_the_first_devices_alone() -> None:
    for speeds, used in (((1.0, 0.02), None), ((1.0, 0.9, 0.01), 2), ((1.0, 1.0, 1.0), None)):
        best = recommended(rank_shapes([costs_of], unlike(*speeds), 2))
        for count in range(1, len(speeds)):
            alone = recommended(rank_shapes([costs_of], unlike(*speeds).take(count), 2))
            assert best.samples_per_s >= alone.samples_per_s
        assert used in (None, len(best.arrangement.used))
