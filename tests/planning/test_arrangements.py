"""Shape, order of unlike devices, cuts, copies and shares together, against all there are."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product
from math import inf

import numpy as np
import pytest
from planned import problem_on

from lightning_hybrid.planning import PartitionTable, Plan
from lightning_hybrid.planning.arrangements import Arrangement, Arrangements, improve
from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.shape_costs import with_copies
from lightning_hybrid.planning.shapes import plans_of, rank_shapes

BATCH, SLICES = 4, (1, 2, 4)


def cluster(*devices: tuple[float, float], bandwidth: float = 2.5e8) -> ClusterDescription:
    """Hosts of two devices, each with its speed and its memory in GB."""
    return ClusterDescription(
        name="test",
        devices=tuple(
            DeviceSpec(name=f"of {speed}", flops_per_s=speed, memory_bytes=memory * 1e9)
            for speed, memory in devices
        ),
        levels=(
            Level(name="host", devices=2, bandwidth_bytes_per_s=8e9, latency_s=1e-5),
            Level(name="network", devices=8, bandwidth_bytes_per_s=bandwidth, latency_s=1e-4),
        ),
    )


def costs_of(samples: int) -> PartitionTable:
    """Work in front, parameters behind, and activations that fill a small device."""
    return PartitionTable(
        names=tuple("abcdef"),
        layers=(1,) * 6,
        parameters=(1,) * 6,
        forward_s=tuple(samples * work for work in (4e-3, 3e-3, 3e-3, 2e-3, 1e-3, 1e-3)),
        backward_s=tuple(samples * work for work in (8e-3, 6e-3, 6e-3, 4e-3, 2e-3, 2e-3)),
        cut_bytes=tuple(samples * size for size in (8e5, 4e5, 2e5, 1e5, 5e4)),
        gradient_bytes=(1e5, 2e5, 4e5, 8e5, 2e7, 2e7),
        kept_bytes=(4e5, 8e5, 2e6, 4e6, 8e7, 8e7),
        activation_bytes=tuple(samples * size for size in (3e7, 2e7, 2e7, 1e7, 1e6, 1e6)),
        step_s=(1e-4,) * 6,
    )


def parts(total: int, replicas: int, least: int) -> Iterator[tuple[int, ...]]:
    """All ways to deal samples to replicas."""
    for shares in product(range(least, total + 1), repeat=replicas):
        if sum(shares) == total:
            yield shares


def least_of_one_choice(at: ClusterDescription, replicas: int, size: int, slices: int) -> float:
    """The least step of so many replicas on these devices in this order."""
    costs = costs_of(BATCH // slices)
    cuts_of = {count: [*combinations(range(1, 6), count - 1)] for count in (1, 2, 3, 4, 6)}
    steps = [inf]
    for recompute in (False, True) if size > 1 and slices > 1 else (False,):
        whole = problem_on(costs, at, size, slices, recompute=recompute)
        for turns in (1, 2, 3) if size > 1 and not recompute else (1,):
            order = [*range(1, size), 0] * turns
            ends = [(*cuts, 6) for cuts in cuts_of.get(size * turns, [])]
            steps += [whole.step_time_s(each, order) for each in ends]
            for shares in parts(replicas * BATCH, replicas, slices):
                if len(set(shares)) == 1:
                    continue
                apart = [
                    problem_on(
                        costs.scaled(share / BATCH),
                        at,
                        size,
                        slices,
                        recompute=recompute,
                        replica=replica,
                    )
                    for replica, share in enumerate(shares)
                ]
                steps += [max(each.step_time_s(e, order) for each in apart) for e in ends]
        if size == 3 and slices > 1 and not recompute:
            for copies in ((2, 1), (1, 2)):
                copied = with_copies(whole, copies, at)
                steps += [copied.step_time_s((*cuts, 6)) for cuts in cuts_of[2]]
    return min(steps)


def least_s(at: ClusterDescription) -> float:
    """The least seconds for a sample of all that the strategy can run, one after the other."""
    found = []
    for replicas, size in ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1)):
        for used in permutations(range(len(at.devices)), replicas * size):
            if used[0] != min(used):  # rank 0 drives the first replica
                continue
            found += [
                least_of_one_choice(at.pick(used), replicas, size, slices) / (replicas * BATCH)
                for slices in SLICES
            ]
    return min(found)


@pytest.mark.conformance
@pytest.mark.parametrize(
    "at",
    [
        cluster((1.0, 9), (0.4, 9), (0.7, 9)),
        cluster((0.3, 9), (1.0, 9), (1.0, 9), bandwidth=5e7),
        cluster((1.0, 0.3), (0.5, 0.3), (1.0, 0.2)),
    ],
    ids=["three speeds", "a slow device in front", "small memory"],
)
def test_nothing_on_three_devices_is_faster_than_the_plan(at: ClusterDescription) -> None:
    shapes = rank_shapes([costs_of], at, BATCH, spare=0.0)
    best = max((shape for shape in shapes if shape.fits), key=lambda shape: shape.samples_per_s)
    assert 1 / best.samples_per_s <= least_s(at) * (1 + 1e-9)


UNLIKE = cluster((0.4, 9), (1.0, 9), (1.0, 9), (0.4, 9))


def test_the_answer_is_no_worse_than_any_start_and_can_be_run() -> None:
    space = Arrangements(costs_of, UNLIKE, BATCH, SLICES)
    starts = [
        Arrangement((0, 1, 2, 3), 4, (1,), 1, 1, False, (6,)),
        Arrangement((0, 1, 2, 3), 1, (3, 1), 1, 4, False, (4, 6)),
        Arrangement((0, 1, 2, 3), 2, (1, 1), 1, 2, False, (2, 6)),
    ]
    found = improve(space, starts)
    assert found is not None
    assert space.cost(found) <= min(map(space.cost, starts))
    assert found.used[0] == min(found.used)
    assert not (found.has_copies and space.timed(found)[1])


def test_whatever_is_changed_can_be_run() -> None:
    at, rng = cluster(*[(1.0, 9), (0.5, 9)] * 3), np.random.default_rng(0)
    space = Arrangements(costs_of, at, BATCH, SLICES)
    genes, seen = space.random(rng), set()
    for _ in range(300):
        genes = space.neighbour(space.cross(genes, space.random(rng), rng), rng)
        assert sorted(genes.devices) == [*range(6)]
        assert genes.used[0] == min(genes.used)
        assert [*genes.ends] == sorted({*genes.ends})
        assert (genes.ends[-1], len(genes.ends)) == (6, len(genes.copies) * genes.turns)
        assert max(genes.copies) == 1 or (genes.turns, len(genes.copies) > 1) == (1, True)
        assert not genes.recompute or genes.turns == 1 < min(genes.size, genes.microbatches)
        seen.add((genes.has_copies, genes.turns, genes.recompute, genes.replicas))
    assert len(seen) > 5  # and many kinds of them were


def test_shares_are_the_best_there_are() -> None:
    space = Arrangements(costs_of, UNLIKE, BATCH, SLICES)
    genes = Arrangement((0, 3, 1, 2), 2, (1, 1), 1, 2, False, (3, 6))
    step_s, shares = space.timed(genes)
    at, costs = UNLIKE.pick(genes.used), costs_of(BATCH // 2)

    def dealt_s(shares: tuple[int, ...]) -> float:
        return max(
            problem_on(costs.scaled(share / BATCH), at, 2, 2, replica=k).step_time_s((3, 6), [1, 0])
            for k, share in enumerate(shares)
        )

    assert step_s == pytest.approx(min(map(dealt_s, parts(2 * BATCH, 2, 2))), rel=1e-12)
    assert step_s == pytest.approx(dealt_s(shares), rel=1e-12)


def test_replicas_that_are_alike_have_a_fast_and_a_slow_device_each() -> None:
    space = Arrangements(costs_of, UNLIKE, BATCH, SLICES)
    found = space.alike(Arrangement((0, 3, 1, 2), 2, (1, 1), 1, 2, False, (3, 6)))
    assert found is not None
    speeds = UNLIKE.relative_speeds
    teams = [found.used[:2], found.used[2:]]
    assert [sorted(speeds[k] for k in team) for team in teams] == [[1.0, 2.5]] * 2
    assert found.used[0] == 0


def test_two_copies_have_twice_the_work_of_one_device_where_links_are_fast() -> None:
    at = cluster((1.0, 9), (1.0, 9), (1.0, 9), bandwidth=8e9)
    space = Arrangements(costs_of, at, BATCH, SLICES)
    found = space.recut(Arrangement((0, 1, 2), 1, (2, 1), 1, 4, False, ()))
    # forwards of 4, 3, 3, 2, 1, 1 ms: 10 of them for two, 4 for the driver
    assert found is not None
    assert found.ends == (3, 6)


def test_a_message_of_two_copies_keeps_half_of_their_ways_out() -> None:
    at = cluster(*[(1.0, 9)] * 3)
    chain = with_copies(problem_on(costs_of(1), at, 3, 4), (2, 1), at).chain
    # the driver and copy 0 share a host, copy 1 is on another: 4 ns a byte, 2 forwards and 4 back
    assert chain.links.seconds_per_byte[1][0] == pytest.approx(3e-9)
    assert chain.links.seconds_per_byte[0][1] == pytest.approx(3e-9)
    assert chain.links.latency_s[1][0] == 1e-4


def test_every_shape_is_tried_once() -> None:
    space = Arrangements(costs_of, UNLIKE, BATCH, SLICES)
    expected = [
        (replicas, copies, turns)
        for stages in range(1, 5)
        for copies in product(range(1, 5), repeat=stages)
        for replicas in range(1, 5)
        for turns in (1, 2, 3)
        if replicas * sum(copies) <= 4 and stages * turns <= 6 and not stages == 1 < copies[0]
        if turns == 1 or stages == sum(copies) > 1
    ]
    found = [(genes.replicas, genes.copies, genes.turns) for genes in space.shapes()]
    assert sorted(found) == sorted(expected)


def test_a_plan_names_the_ranks_of_devices_that_change_places() -> None:
    first = next(s for s in rank_shapes([costs_of], UNLIKE, BATCH) if s.arrangement.size == 2)

    def on(replicas: int, *devices: int) -> Plan:
        genes = replace(first.arrangement, replicas=replicas, devices=devices)
        return plans_of(replace(first, arrangement=genes, shares=()), costs_of, UNLIKE, BATCH)[0]

    assert on(1, 1, 3, 0, 2).ranks == ()  # those that are left are ranks 0 and 1
    plan = on(2, 0, 3, 2, 1)
    assert plan.ranks == (0, 3, 2, 1)
    assert plan.capacities == (1.0, 1.0)
    assert type(plan).from_json(plan.to_json()) == plan
    assert "ranks in the order 0, 3, 2, 1" in plan.describe()


def test_a_ring_is_as_slow_as_that_of_its_slowest_stage() -> None:
    levels = (replace(UNLIKE.levels[0], devices=4), UNLIKE.levels[1])
    six = replace(cluster(*[(1.0, 9)] * 6), levels=levels)
    # of two replicas of three, the drivers are on one host and other stages are not
    reduce_s = problem_on(costs_of(4), six, 3, 1).table.reduce_s
    carried = sum(costs_of(4).gradient_bytes) * 2 / levels[1].bandwidth_bytes_per_s
    assert sum(reduce_s) == pytest.approx(carried + 2 * levels[1].latency_s)
