from itertools import combinations, pairwise
from typing import Any

import pytest
from planned import planned, simulate

from lightning_hybrid.allocation import merge
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.schedules.gpipe import gpipe

NAMES = ("stem", "layer1", "layer2", "layer3", "layer4", "head")


def plan(**changes: Any) -> Plan:
    arguments: dict[str, Any] = {
        "names": NAMES,
        "forward_s": [1.0, 2.0, 3.0, 3.0, 2.0, 1.0],
        "backward_s": [2.0, 4.0, 6.0, 6.0, 4.0, 2.0],
        "cut_bytes": [8.0, 4.0, 2.0, 1.0, 1.0],
        "parameters": [1, 2, 3, 4, 5, 6],
        "layers": [2, 2, 2, 2, 2, 1],
        "replicas": 2,
        "stages": 2,
        "microbatches": 4,
    }
    return planned(**(arguments | changes))


@pytest.mark.parametrize("method", ["gabra", "exact"])
@pytest.mark.parametrize("objective", ["step", "makespan"])
def test_a_symmetric_network_is_cut_in_the_middle(method: Any, objective: Any) -> None:
    found = plan(allocation=method, objective=objective)
    assert found.cuts == ("layer3",)
    assert found.allocation == ("dynamic" if objective == "step" else "exact")
    assert [row.load for row in found.rows] == [0.5, 0.5]
    assert [row.parameters for row in found.rows] == [6, 15]
    assert [row.layers for row in found.rows] == [6, 5]


def test_the_last_stage_is_on_the_drivers_device() -> None:
    assert plan(stages=3).devices == (1, 2, 0)
    assert plan(stages=1, microbatches=1).devices == (0,)


@pytest.mark.parametrize("capacities", [[1.0, 3.0], [3.0, 1.0]])
def test_the_driver_keeps_the_last_stage_whatever_its_speed(capacities: list[float]) -> None:
    found = plan(capacities=capacities)
    assert found.devices == (1, 0)
    assert found.rows[1].load == pytest.approx(capacities[0] / 4, abs=0.1)


def test_the_prediction_is_the_simulation_of_the_schedules_own_lists() -> None:
    expected = simulate(gpipe(2, 4), [6.0, 6.0], [12.0, 12.0], send_s=[2.0 / 4.0])
    assert plan(bandwidth_bytes_per_s=4.0).predicted_step_s == expected.makespan_s


def test_one_stage_takes_the_time_of_all_micro_batches() -> None:
    assert plan(stages=1).predicted_step_s == 4 * 36


def test_a_slow_link_moves_the_cut_to_where_little_crosses() -> None:
    fast = plan(cut_bytes=[0.0, 0.0, 9.0, 0.0, 0.0])
    slow = plan(cut_bytes=[0.0, 0.0, 9.0, 0.0, 0.0], bandwidth_bytes_per_s=0.2)
    assert fast.cuts == ("layer3",)
    assert slow.cuts in {("layer2",), ("layer4",)}


def test_merging_closes_the_most_expensive_cuts() -> None:
    found = plan(allocation="merging", stages=3, bandwidth_bytes_per_s=1.0)
    expected = merge([3.0, 6.0, 9.0, 9.0, 6.0, 3.0], [16.0, 8.0, 4.0, 2.0, 2.0], 3)
    assert found.cuts == tuple(NAMES[end] for end in expected[:-1])
    assert found.allocation == "merging"
    with pytest.raises(PlanError, match="one run of partitions"):
        plan(allocation="merging", contiguous=False)
    with pytest.raises(PlanError, match="2 stages do not fit"):
        plan(allocation="merging", memory_bytes=[6] * 6, memory_limits=[12, 12])


def test_memory_is_a_hard_limit() -> None:
    memory = [6, 6, 6, 1, 1, 1]
    assert plan(memory_bytes=memory, memory_limits=[20, 20]).cuts == ("layer3",)
    found = plan(memory_bytes=memory, memory_limits=[20, 12])  # stage 0 is on device 1
    assert found.cuts == ("layer2",)
    assert [row.memory_bytes for row in found.rows] == [12, 9]


def test_the_plan_records_the_speeds_and_predicts_with_them() -> None:
    found = plan(capacities=[0.5, 1.0])
    forward_s, backward_s = (
        (row.load * 12 for row in found.rows),
        (row.load * 24 for row in found.rows),
    )
    (f0, f1), (b0, b1) = forward_s, backward_s
    assert found.capacities == (0.5, 1.0)
    expected = simulate(gpipe(2, 4), [f0, f1 / 0.5], [b0, b1 / 0.5]).makespan_s
    assert found.predicted_step_s == pytest.approx(expected)
    assert "speed" in found.describe()
    assert "speed" not in plan().describe()


def test_given_cut_points_are_taken() -> None:
    found = plan(stages=3, cut_points=("layer1", "head"))
    assert found.cuts == ("layer1", "head")
    assert found.allocation == "given"
    assert found.rows[1].partitions == ("layer1", "layer2", "layer3", "layer4")


def test_a_free_placement_gives_a_device_several_stages() -> None:
    times: dict[str, Any] = {"forward_s": [3.0, 4.0, 4.0, 3.0, 3.0, 3.0], "backward_s": [0.0] * 6}
    times["objective"] = "makespan"
    chain, found = (plan(contiguous=c, **times) for c in (True, False))
    loads = [sum(row.load for row in found.rows if row.device == j) for j in (0, 1)]
    assert loads == pytest.approx([0.5, 0.5])
    assert max(row.load for row in chain.rows) > 0.5
    assert found.devices[-1] == 0
    assert found.stages > found.devices_per_replica == 2
    assert all(a != b for a, b in pairwise(found.devices))  # neighbouring runs are one stage
    assert [n for row in found.rows for n in row.partitions] == list(NAMES)
    assert Plan.from_json(found.to_json()) == found


def test_a_free_placement_is_predicted_on_devices_that_take_turns() -> None:
    times = {"forward_s": [3.0, 4.0, 4.0, 3.0, 3.0, 3.0], "backward_s": [0.0] * 6}
    found = plan(contiguous=False, **times)
    forward_s = [row.load * 20 for row in found.rows]
    timeline = simulate(
        gpipe(found.stages, 4), forward_s, [0.0] * found.stages, devices=found.devices
    )
    assert found.predicted_step_s == pytest.approx(timeline.makespan_s)


def test_the_memory_of_a_device_is_that_of_all_its_stages() -> None:
    memory = {"memory_bytes": [6, 6, 6, 1, 1, 1], "memory_limits": [14, 9]}
    found = plan(contiguous=False, **memory)
    for device, limit in enumerate(memory["memory_limits"]):
        assert sum(row.memory_bytes or 0 for row in found.rows if row.device == device) <= limit


def test_dear_cuts_make_a_free_placement_contiguous() -> None:
    found = plan(contiguous=False, cut_bytes=[9.0] * 5, bandwidth_bytes_per_s=1.0)
    assert found.devices == (1, 0)


def test_given_cut_points_are_one_stage_per_device() -> None:
    assert plan(stages=3, cut_points=("layer1", "head"), contiguous=False).devices == (1, 2, 0)


def test_the_plan_survives_json_with_its_rows() -> None:
    assert Plan.from_json(plan().to_json()) == plan()


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stages", [2, 3])
def test_no_other_cuts_have_a_shorter_predicted_step(stages: int, microbatches: int) -> None:
    seconds = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]

    def step_s(cuts: Any) -> float:
        found = plan(
            forward_s=seconds, backward_s=seconds[::-1], cut_bytes=[5.0, 1.0, 2.0, 4.0, 3.0],
            bandwidth_bytes_per_s=4.0, latency_s=0.1, reduce_s=[4.0, 0, 0, 0, 0, 9.0],
            step_s=[1.0] * 6, stages=stages, microbatches=microbatches, cut_points=cuts,
        )  # fmt: skip
        return found.predicted_step_s or 0.0

    every = combinations(NAMES[1:], stages - 1)
    assert step_s(None) == pytest.approx(min(step_s(cuts) for cuts in every))


def test_where_filling_counts_gabra_makes_loops_that_beat_the_best_chain() -> None:
    even: dict[str, Any] = {
        "names": [f"block{i}" for i in range(8)], "forward_s": [1.0] * 8, "backward_s": [2.0] * 8,
        "cut_bytes": [0.0] * 7, "parameters": [1] * 8, "layers": [1] * 8, "microbatches": 2,
    }  # fmt: skip
    chain, free = plan(**even), plan(**even, contiguous=False)
    assert chain.predicted_step_s == 3 * 4 * (2 + 1)
    assert (free.predicted_step_s or 0) <= 3 * 4 * (2 + 1 / 2)  # as a loop of two stages each
    assert (chain.allocation, free.allocation) == ("dynamic", "gabra")


def test_where_cuts_are_dear_the_best_chain_is_taken_and_said_so() -> None:
    found = plan(contiguous=False, cut_bytes=[9.0] * 5, bandwidth_bytes_per_s=1.0)
    assert found.allocation == "dynamic"
    assert found.predicted_step_s == plan(cut_bytes=[9.0] * 5, bandwidth_bytes_per_s=1.0).predicted_step_s  # fmt: skip # noqa: E501


def test_the_papers_objective_gives_a_plan_too() -> None:
    assert plan(objective="profit").objective == "profit"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 7}, r"stages\(7\) are more than the 6 partitions"),
        ({"cut_points": ("layer9",)}, "no partition begins with 'layer9'; close to it: 'layer4'"),
        ({"cut_points": ("stem",)}, "none of them its first partition; given: stem"),
        ({"stages": 3, "cut_points": ("head", "layer1")}, "in the order of the network"),
        ({"cut_points": ()}, "need 1 cut points .* given: none"),
        ({"memory_bytes": [1], "memory_limits": [9, 9]}, "memory_bytes has 1 entries, 6 are"),
        (
            {"memory_bytes": [4, 4, 4, 4, 4, 4], "memory_limits": [7, 19]},
            r"stages\(2\) cannot be placed",
        ),
        ({"contiguous": False, "allocation": "exact"}, "'exact' places no partitions freely"),
        ({"cut_bytes": [1.0]}, "cut_bytes has 1 entries, 5 are needed for 6 partitions"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_numbers(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**changes)
