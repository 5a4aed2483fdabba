"""Cuts of stages with copies, against all cuts and against chains."""

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from planned import planned

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import copied_stages
from lightning_hybrid.planning.copied_stages import CopiedStages, best_cuts, devices_of_copies
from lightning_hybrid.planning.dealt_time import dealt_s
from lightning_hybrid.planning.partition_table import PartitionTable, TiedWeight
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.plan_page import predicted_lanes
from lightning_hybrid.planning.simulate import DealtCosts
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import StageCopy


def table(n: int, seed: int = 0, **more: Any) -> PartitionTable:
    chance = random.Random(seed)

    def some(count: int) -> list[float]:
        return [chance.uniform(0.2, 2.0) for _ in range(count)]

    values: dict[str, Any] = {
        "names": [f"p{i}" for i in range(n)],
        "forward_s": some(n),
        "backward_s": some(n),
        "cut_bytes": some(n - 1),
        "parameters": [1] * n,
        "layers": [1] * n,
        "reduce_s": some(n),
        "step_s": some(n),
        "gradient_bytes": some(n),
        "output_bytes": 2.0,
    }
    return PartitionTable(**(values | more))


def stages(
    partitions: PartitionTable, copies: tuple[int, ...], microbatches: int = 5, **more: Any
) -> CopiedStages:
    count = len(copies)
    limits = more.pop("memory_limits", ())
    return CopiedStages(
        chain=StepProblem(
            table=partitions,
            speeds=more.pop("chain_speeds", [1.0] * count),
            links=LinkCosts.equal(count, 4.0, 0.01),
            microbatches=microbatches,
            memory_limits=limits,
        ),
        copies=copies,
        speeds=more.pop("speeds", [1.0] * sum(copies)),
        links=more.pop("links", LinkCosts.equal(sum(copies), 4.0, 0.01)),
        **more,
    )


def by_hand(partitions: PartitionTable, copies: tuple[int, ...], ends: list[int]) -> float:
    """The step of a set of cuts from sums over its stages."""
    bounds = list(zip([0, *ends[:-1]], ends))

    def sums(values: Any) -> list[float]:
        return [sum(values[a:b]) for a, b in bounds]

    costs = StepCosts(
        forward_s=sums(partitions.forward_s),
        backward_s=sums(partitions.backward_s),
        devices=[*range(1, len(copies)), 0],
        send_s=[partitions.cut_bytes[end - 1] / 4.0 for end in ends[:-1]],
        latency_s=[0.01] * (len(copies) - 1),
        reduce_s=sums(partitions.reduce_s),
        step_s=sums(partitions.step_s),
    )
    dealt = DealtCosts.alike(costs, copies)
    if copies[-1] > 1:
        # outputs go to the driver, which has the last copy, and then the stage's weights
        last, outputs = len(copies) - 1, (partitions.output_bytes / 4.0, 0.01)
        collecting = {
            (StageCopy(last, i), StageCopy(last + 1, 0)): outputs for i in range(copies[-1] - 1)
        }
        taken_s = sums(partitions.gradient_bytes)[-1] / 4.0 + 0.01
        step_s = [*dealt.step_s[:-1], [*dealt.step_s[-1][:-1], costs.step_s[-1] + taken_s]]
        dealt = replace(dealt, edges={**dealt.edges, **collecting}, step_s=step_s)
    return dealt_s(dealt, 5)


SHAPES = [(2, 1), (3, 1), (2, 1, 1), (1, 2, 1), (7, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("copies", SHAPES)
def test_few_cuts_are_all_tried(copies: tuple[int, ...]) -> None:
    partitions, n = table(8, seed=len(copies)), 8
    ends, all_tried = best_cuts(stages(partitions, copies))
    least = min(
        by_hand(partitions, copies, [*cuts, n])
        for cuts in combinations(range(1, n), len(copies) - 1)
    )
    assert all_tried
    assert by_hand(partitions, copies, ends) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("copies", SHAPES)
def test_the_descent_finds_what_trying_all_cuts_finds(
    copies: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(5):
        problem = stages(table(9, seed=seed), copies)
        best, _ = best_cuts(problem)
        with monkeypatch.context() as patched:
            patched.setattr(copied_stages, "_MOST_CUTS", 0)
            ends, all_tried = best_cuts(problem)
        assert not all_tried
        # it stops where no single cut can be moved with a gain
        assert problem.step_time_s(ends) <= 1.02 * problem.step_time_s(best)


def test_copies_draw_work_to_their_stage() -> None:
    even = table(8, forward_s=[1.0] * 8, backward_s=[1.0] * 8, reduce_s=[], step_s=[])
    assert best_cuts(stages(even, (1, 1), 12))[0] == [4, 8]
    assert best_cuts(stages(even, (3, 1), 12))[0] == [6, 8]


def test_memory_bounds_every_copy() -> None:
    heavy = table(4, memory_bytes=[4.0] * 4)
    ends, _ = best_cuts(stages(heavy, (3, 1), memory_limits=[12.0, 4.0]))
    assert ends == [1, 4]
    with pytest.raises(PlanError, match=r"copies\(3, 1\) fit into \[7.0, 7.0\]"):
        best_cuts(stages(heavy, (3, 1), memory_limits=[7.0, 7.0]))


def test_each_copy_computes_at_its_own_speed() -> None:
    problem = stages(
        table(2), (2, 1), speeds=[1.0, 0.5, 2.0], chain_speeds=[1.0, 0.5], microbatches=2
    )
    (slow, fast), _ = problem.costs([1, 2]).forward_s
    assert slow == pytest.approx(4 * fast)
    assert slow == pytest.approx(problem.chain.table.forward_s[0] / 0.5)


def test_gradients_are_summed_over_the_copies_of_a_stage() -> None:
    after = [([3.0, 5.0], [1.0, 1.0]), ([0.0, 0.0], [1.0, 1.0])]
    assert stages(table(2), (2, 1), after=after).costs([1, 2]).reduce_s == [3.0, 0.0]


def test_a_plan_says_the_devices_of_the_copies_and_their_step() -> None:
    arguments = {
        "names": tuple("abcd"),
        "forward_s": [3.0, 3.0, 3.0, 3.0],
        "backward_s": [3.0, 3.0, 3.0, 3.0],
        "cut_bytes": [0.0] * 3,
        "parameters": [1] * 4,
        "layers": [1] * 4,
        "replicas": 2,
        "stages": 2,
        "microbatches": 6,
    }
    found = planned(**arguments, copies=(3, 1))
    assert (found.devices, found.cuts, found.allocation) == (((1, 2, 3), 0), ("d",), "exact")
    assert found.world_size == 8
    # three copies hand over every 9 s what the driver takes in 9 s
    assert found.predicted_step_s == 2 * (9 + 9 + 9)
    lanes = predicted_lanes(found)
    assert [*lanes] == ["device 1", "device 2", "device 3", "device 0 (driver)"]
    forwards = [span.label for span in lanes["device 2"] if span.kind == "forward"]
    assert forwards == ["1", "4"]
    assert max(span.end_s for spans in lanes.values() for span in spans) == 2 * (9 + 9 + 9)
    with pytest.raises(PlanError, match="planned with schedule 'gpipe', not 'zero_bubble'"):
        planned(**arguments, copies=(3, 1), schedule="zero_bubble")


def test_a_plan_gives_the_driver_a_copy_of_the_last_stage() -> None:
    found = planned(
        names=tuple("abcd"),
        forward_s=[3.0] * 4,
        backward_s=[3.0] * 4,
        cut_bytes=[0.0] * 3,
        parameters=[1] * 4,
        layers=[1] * 4,
        replicas=1,
        stages=2,
        microbatches=6,
        copies=(1, 3),
    )
    assert (found.devices, found.cuts, found.allocation) == ((1, (2, 3, 0)), ("b",), "exact")
    assert Plan.from_json(found.to_json()) == found
    # the last of six leaves the first stage after 18 s
    assert found.predicted_step_s == 2 * (18 + 9)
    lanes = predicted_lanes(found)
    assert [*lanes] == ["device 1", "device 2", "device 3", "device 0 (driver)"]
    forwards = [s.label for s in lanes["device 0 (driver)"] if s.kind == "forward"]
    assert forwards == ["2", "5"]


def test_each_pair_of_copies_has_the_link_of_its_devices() -> None:
    """Devices 0 and 1 are neighbours, device 2 is farther away."""
    links = LinkCosts(
        seconds_per_byte=[[0, 1, 5], [1, 0, 5], [5, 5, 0]],
        latency_s=[[0, 0.1, 0.2], [0.1, 0, 0.2], [0.2, 0.2, 0]],
    )
    edges = stages(table(2, cut_bytes=[3.0]), (2, 1), links=links).costs([1, 2]).edges
    assert edges == {
        (StageCopy(0, 0), StageCopy(1, 0)): (3.0, 0.1),
        (StageCopy(0, 1), StageCopy(1, 0)): (15.0, 0.2),
    }


def test_devices_are_numbered_in_the_order_of_their_stages() -> None:
    assert devices_of_copies((3, 1)) == ((1, 2, 3), (0,))
    assert devices_of_copies((1, 2, 1)) == ((1,), (2, 3), (0,))
    assert devices_of_copies((2, 3)) == ((1, 2), (3, 4, 0))


def test_what_tied_weights_move_is_counted_however_the_steps_of_stages_are_known() -> None:
    plain, tied = (table(6, tied=shared) for shared in ([], [TiedWeight(3.0, (0, 5))]))
    given = [[1.0] * 6] * 2
    for after in ((), (given, given, given)):
        one, other = (
            stages(each, (1, 2, 1), after=after).stage_costs([2, 4, 6]) for each in (plain, tied)
        )
        more = [b - a for a, b in zip(one.step_s, other.step_s)]
        # (value and gradient of 3 bytes at 4 bytes/s, between the first stage and the driver)
        assert more == pytest.approx([2 * (3.0 / 4.0 + 0.01), 0.0, 0.0])
