"""Shapes whose stages have copies, against every set of cuts with costs summed by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.copied_stages import devices_of_copies
from lightning_hybrid.planning.dealt_time import dealt_s
from lightning_hybrid.planning.partition_table import PartitionTable, TiedWeight
from lightning_hybrid.planning.shape_costs import CostsOf, ring_s
from lightning_hybrid.planning.shapes import Shape, plans_of, rank_shapes, recommended
from lightning_hybrid.planning.simulate import DealtCosts
from lightning_hybrid.schedules import StageCopy

HOST = Level(name="host", devices=2, bandwidth_bytes_per_s=8e9, latency_s=0.0)
NETWORK = Level(name="network", devices=4, bandwidth_bytes_per_s=1.25e9, latency_s=1e-4)


def cluster(*speeds: float, levels: tuple[Level, ...] = (HOST, NETWORK)) -> ClusterDescription:
    devices = tuple(DeviceSpec(name=f"of {speed}", flops_per_s=speed) for speed in speeds)
    return ClusterDescription(name="test", devices=devices, levels=levels)


def costs_of(samples: int) -> PartitionTable:
    """Work in front, parameters behind, as in a network with a fully connected head."""
    return PartitionTable(
        names=tuple("abcdef"),
        layers=(1,) * 6,
        parameters=(1,) * 6,
        forward_s=tuple(samples * work for work in (4e-3, 3e-3, 3e-3, 2e-3, 1e-3, 1e-3)),
        backward_s=tuple(samples * work for work in (8e-3, 6e-3, 6e-3, 4e-3, 2e-3, 2e-3)),
        cut_bytes=tuple(samples * size for size in (8e5, 4e5, 2e5, 1e5, 5e4)),
        gradient_bytes=(1e5, 2e5, 4e5, 8e5, 2e8, 2e8),
        kept_bytes=(0.0,) * 6,
        activation_bytes=(0.0,) * 6,
        step_s=(1e-4,) * 6,
        output_bytes=samples * 2e5,
    )


def speed(at: ClusterDescription, device: int, size: int) -> float:
    """Of the slowest of the devices that stand for this one in all replicas."""
    return min(at.relative_speeds[device::size])


def by_hand(shape: Shape, at: ClusterDescription, ends: list[int], batch: int) -> float:
    """The step of other cuts of the same shape."""
    size, slices = shape.arrangement.size, shape.arrangement.microbatches
    costs, owners = costs_of(batch // slices), devices_of_copies(shape.arrangement.copies)
    bounds = list(zip([0, *ends[:-1]], ends))

    def each(work: Sequence[float]) -> list[list[float]]:
        return [
            [sum(work[a:b]) / speed(at, device, size) for device in devices]
            for (a, b), devices in zip(bounds, owners)
        ]

    groups = [
        [k + device for k in range(0, len(shape.arrangement.used), size) for device in devices]
        for devices in owners
    ]
    levels = [at.level(ranks) if len(ranks) > 1 else None for ranks in groups]
    reduce_s = []
    for (a, b), ranks, level in zip(bounds, groups, levels):
        rings = min(levels.count(level), 2 if level is NETWORK else 1)
        bytes_s = ring_s(level, sum(costs.gradient_bytes[a:b]), len(ranks), rings)
        # all messages of a ring wait once, with the first partition
        waits_s = ring_s(level, 0.0, len(ranks))
        reduce_s.append(bytes_s - (waits_s if a else 0.0))
    edges = {}
    for stage, (here, there) in enumerate(pairwise(owners)):
        for i, source in enumerate(here):
            for j, target in enumerate(there):
                found = [
                    at.level([k + source, k + target]) for k in range(0, len(at.devices), size)
                ]
                level = max((each for each in found if each), key=lambda level: level.devices)
                sent = costs.cut_bytes[ends[stage] - 1] / level.bandwidth_bytes_per_s
                edges[StageCopy(stage, i), StageCopy(stage + 1, j)] = (sent, level.latency_s)
    step_s = each(costs.step_s)
    for i, source in enumerate(owners[-1][:-1]):
        found = [at.level([k + source, k]) for k in range(0, len(at.devices), size)]
        level = max((each for each in found if each), key=lambda level: level.devices)
        sent = costs.output_bytes / level.bandwidth_bytes_per_s
        edges[StageCopy(len(owners) - 1, i), StageCopy(len(owners), 0)] = (sent, level.latency_s)
        if i == 0:  # which gives the driver the weights
            size_bytes = sum(costs.gradient_bytes[ends[-2] :])
            lent_s = size_bytes / level.bandwidth_bytes_per_s + level.latency_s
            step_s[-1][-1] = step_s[-1][0] + lent_s
    hand = DealtCosts(
        forward_s=each(costs.forward_s),
        backward_s=each(costs.backward_s),
        weight_s=each((0.0,) * 6),
        step_s=step_s,
        reduce_s=reduce_s,
        edges=edges,
    )
    return dealt_s(hand, slices)


@pytest.mark.parametrize("speeds", [(1.0,) * 4, (1.0, 1.0, 0.5, 0.5), (1.0, 0.4, 0.4, 0.2)])
def test_of_four_devices_no_cuts_of_any_shape_with_copies_are_faster(
    speeds: tuple[float, ...],
) -> None:
    shapes = [s for s in rank_shapes([costs_of], cluster(*speeds), 12) if s.arrangement.has_copies]
    # of four devices, and of the first three where they are not alike
    expected = {(3, 1), (2, 2), (1, 3), (2, 1, 1), (1, 2, 1), (1, 1, 2)}
    expected |= {(2, 1), (1, 2)} if len(set(speeds)) > 1 else set()
    made = [shape.arrangement for shape in shapes]
    in_order = [genes.copies for genes in made if genes.used == (*range(len(genes.used)),)]
    assert {*in_order} == expected
    least_s = float("inf")
    for shape in shapes:
        used = cluster(*speeds).pick(shape.arrangement.used)
        for cuts in combinations(range(1, 6), len(shape.arrangement.copies) - 1):
            step_s = by_hand(shape, used, [*cuts, 6], 12)
            least_s = min(least_s, step_s / shape.samples)
            if shape.arrangement.ends == (*cuts, 6):
                assert shape.step_s == pytest.approx(step_s, rel=1e-9)
    fastest_s = min(shape.step_s / shape.samples for shape in shapes)
    assert fastest_s == pytest.approx(least_s, rel=1e-9)


SLOW = replace(NETWORK, bandwidth_bytes_per_s=2.5e8)


@pytest.mark.parametrize(
    "levels", [(SLOW,), (replace(HOST, bandwidth_bytes_per_s=2.5e8), SLOW)], ids=["one", "two"]
)
def test_copies_in_front_of_the_parameters_are_fastest_between_slow_hosts(
    levels: tuple[Level, ...],
) -> None:
    at = cluster(1.0, 1.0, 1.0, 1.0, levels=levels)
    best = recommended(rank_shapes([costs_of], at, 12))
    assert best.arrangement.copies == (3, 1)
    assert str(best).startswith("1 replica x 2 stages (3-1 copies)")
    plan = plans_of(best, costs_of, at, 12)[0]
    assert (plan.copies, plan.devices, plan.world_size) == ((3, 1), ((1, 2, 3), 0), 4)
    assert plan.predicted_step_s == best.step_s
    assert type(plan).from_json(plan.to_json()) == plan


def parameters_in_front(outputs: float) -> CostsOf:
    """Parameters in front, work behind, as in a network that begins with large embeddings."""

    def costs(samples: int) -> PartitionTable:
        table, turned = costs_of(samples), slice(None, None, -1)
        return replace(
            table,
            forward_s=table.forward_s[turned],
            backward_s=table.backward_s[turned],
            cut_bytes=table.cut_bytes[turned],
            gradient_bytes=table.gradient_bytes[turned],
            output_bytes=samples * outputs,
        )

    return costs


def test_copies_of_the_last_stage_pay_until_their_outputs_are_large() -> None:
    at, found = cluster(1.0, 1.0, 1.0, 1.0, levels=(SLOW,)), {}
    for outputs in (4e3, 1e7):
        costs = parameters_in_front(outputs)
        shapes = rank_shapes([costs], at, 12)
        found[outputs] = recommended(shapes)
        copied = [s.samples_per_s for s in shapes if s.arrangement.copies[-1] > 1]
        assert (found[outputs].samples_per_s == max(copied)) == (outputs == 4e3)
        plan = plans_of(found[outputs], costs, at, 12)[0]
        assert plan.predicted_step_s == found[outputs].step_s
    assert found[4e3].arrangement.copies == (1, 3)
    plan = plans_of(found[4e3], parameters_in_front(4e3), at, 12)[0]
    HybridGabraStrategy(plan=plan)  # a run takes it
    assert str(found[4e3]).startswith("1 replica x 2 stages (1-3 copies)")


def test_on_fast_links_the_fastest_shape_has_no_copies() -> None:
    fast = replace(NETWORK, bandwidth_bytes_per_s=1e11, latency_s=1e-6)
    at = cluster(1.0, 1.0, 1.0, 1.0, levels=(fast,))
    assert not recommended(rank_shapes([costs_of], at, 12)).arrangement.has_copies


def test_replicas_that_divide_states_have_no_copies() -> None:
    def dividing(samples: int) -> PartitionTable:
        return replace(costs_of(samples), kept_bytes=(2e6,) * 6, state_bytes=(1e6,) * 6)

    for at in (cluster(1.0, 1.0, 1.0, 1.0), cluster(1.0, 0.4, 1.0)):
        assert not any(s.arrangement.has_copies for s in rank_shapes([dividing], at, 4))


def test_stages_that_share_a_weight_have_no_copies() -> None:
    """The first partition shares a weight with the last one, so that only stages between may."""

    def tied(samples: int) -> PartitionTable:
        return replace(costs_of(samples), tied=[TiedWeight(1e6, (0, 5))])

    shapes = rank_shapes([tied], cluster(1.0, 1.0, 1.0, 1.0, levels=(SLOW,)), 12)
    made = [shape.arrangement for shape in shapes]
    assert {genes.copies for genes in made if genes.has_copies} == {(1, 2, 1)}
