import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.plan import VERSION, Plan, StagePlan


def plan(**changes: Any) -> Plan:
    rows = (
        StagePlan(layers=5, partitions=("stem", "layer1"), parameters=100, load=0.6, device=1),
        StagePlan(layers=2, partitions=("head",), parameters=20, load=0.4, device=0),
    )
    values = {
        "replicas": 2,
        "stages": 2,
        "microbatches": 4,
        "schedule": "gpipe",
        "cuts": ("head",),
        "rows": rows,
        "predicted_step_s": 0.125,
    }
    return Plan(**(values | changes))


def test_a_plan_survives_json() -> None:
    assert Plan.from_json(plan().to_json()) == plan()


def test_a_plan_survives_a_file(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan()


def test_the_driver_is_device_0_and_owns_the_last_stage() -> None:
    small = Plan(replicas=1, stages=3, microbatches=1, schedule="gpipe", cuts=("b", "c"))
    assert small.devices == (1, 2, 0)
    assert small.data_parallel_sizes == (1, 1, 1)
    assert small.world_size == 3


def test_a_plan_says_what_the_genetic_part_of_its_search_is_worth() -> None:
    note = "crossover is not shown to help"
    assert note in plan(allocation="gabra", objective="step").describe()
    assert note not in plan(allocation="dynamic", objective="step").describe()


def free(**changes: Any) -> Plan:
    """Four stages that take turns on two devices."""
    values = {"stages": 4, "cuts": ("b", "c", "d"), "devices": (1, 0, 1, 0), "rows": ()}
    return plan(**(values | changes))


def test_a_device_may_have_several_stages() -> None:
    found = free(capacities=(1.0, 0.5))
    assert (found.devices_per_replica, found.world_size, found.data_parallel_sizes) == (
        2,
        4,
        (2, 2, 2, 2),
    )
    assert "2 replicas x 2 devices with 4 stages = 4 devices" in found.describe()
    assert [row["speed"] for row in found.table()] == [0.5, 1.0, 0.5, 1.0]
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": (2, 0, 2, 0)}, r"devices\(2, 0, 2, 0\) must name each of 0..1"),
        ({"devices": (1, 0, 0, 1)}, "end with 0"),
        ({"devices": (0, 0, 0, 0)}, r"stages\(4\) are all on one device"),
        ({"devices": (1, 0)}, r"stages\(4\) != 2 devices"),
        ({"capacities": (1.0,) * 4}, r"devices\(2\) != 4 capacities"),
    ],
)
def test_a_free_placement_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        free(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": 0}, r"replicas\(0\) must be an integer of at least 1"),
        ({"stages": "2"}, r"stages\('2'\) must be an integer"),
        ({"cuts": ()}, r"stages\(2\) need 1 different cuts, the plan has 0"),
        ({"devices": (0, 1)}, r"devices\(0, 1\).*end with 0"),
        ({"devices": (1, 2, 0)}, r"stages\(2\) != 3 devices"),
        ({"rows": plan().rows[::-1]}, r"contradict the rows of the stages, \(0, 1\)"),
        ({"version": 99}, r"format version 99, this package reads 2"),
    ],
)
def test_a_contradiction_is_refused_with_both_numbers(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**changes)


def test_a_stream_does_not_compute_again_in_this_way() -> None:
    with pytest.raises(PlanError, match=r"recompute\(True\)"):
        Plan(replicas=1, stages=2, microbatches=2, schedule="fdg", cuts=("b",), recompute=True)


def test_unknown_and_missing_keys_are_named() -> None:
    record = json.loads(plan().to_json())
    with pytest.raises(PlanError, match="unknown field 'cutz'; did you mean 'cuts'"):
        Plan.from_json(json.dumps(record | {"cutz": 1}))
    del record["cuts"], record["schedule"]
    with pytest.raises(PlanError, match="the plan lacks 'schedule', 'cuts'"):
        Plan.from_json(json.dumps(record))


def test_a_wrong_row_names_its_stage() -> None:
    record = json.loads(plan().to_json())
    del record["rows"][1]["load"]
    with pytest.raises(PlanError, match="stage 1 of the plan lacks 'load'"):
        Plan.from_json(json.dumps(record))


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json: the plan is "):
        Plan.load(tmp_path / "plan.json")


def test_a_value_of_the_wrong_type_is_a_plan_error() -> None:
    record = json.loads(plan().to_json())
    with pytest.raises(PlanError, match="wrong type"):
        Plan.from_json(json.dumps(record | {"cuts": 5}))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json"):
        Plan.load(tmp_path / "nowhere.json")


def test_the_table_has_one_row_per_stage() -> None:
    assert plan().table()[0] == {
        "stage": 0,
        "device": 1,
        "replicas": 2,
        "partitions": "stem .. layer1",
        "layers": 5,
        "parameters": 100,
        "load": 0.6,
    }


def test_a_plan_prints_its_shape_and_its_stages() -> None:
    text = str(plan())
    assert "2 replicas x 2 stages = 4 devices, 4 micro-batches, gpipe" in text
    assert "stem .. layer1" in text
    assert "60.0%" in text


def test_a_plan_says_how_it_is_known_that_samples_do_not_meet() -> None:
    plan = free(split_by="proof, tail 1.0%")
    assert "\nsamples do not meet: proof, tail 1.0%\n" in plan.describe()
    assert Plan.from_json(plan.to_json()) == plan
    assert "samples" not in free().describe()


def test_a_plan_for_another_network_says_which_partitions_differ() -> None:
    """A plan that was made for another network; the partitions that differ are named."""
    plan().check_network(["stem", "layer1", "head"], "'net' (Net)")
    plan(rows=()).check_network(["anything"], "'net' (Net)")  # cuts alone are for any network
    text = r"only the plan has 'layer1', .*network has 'layer1.0', 'layer1.1' \(3 and 4 in all\)"
    with pytest.raises(PlanError, match=text):
        plan().check_network(["stem", "layer1.0", "layer1.1", "head"], "'net' (Net)")
    with pytest.raises(PlanError, match=r"only the plan has none, .*has 'more'"):
        plan().check_network(["stem", "layer1", "more", "head"], "'net' (Net)")


def test_the_file_of_a_delayed_plan_has_its_delays() -> None:
    plan = Plan(replicas=1, stages=3, microbatches=1, schedule="fdg", cuts=("b", "c"))
    record = json.loads(plan.to_json())
    assert record["delays"] == [3, 1, 0]
    assert Plan.from_json(plan.to_json()) == plan
    assert "delays" not in json.loads(replace(plan, schedule="1f1b_stream").to_json())


def test_a_stage_with_copies_names_the_devices_of_all() -> None:
    copied = Plan(
        replicas=2,
        stages=2,
        microbatches=6,
        schedule="gpipe",
        cuts=("b",),
        devices=((1, 2, 3), (0,)),
    )
    assert (copied.copies, copied.devices, copied.first_devices) == ((3, 1), ((1, 2, 3), 0), (1, 0))
    assert (copied.devices_per_replica, copied.world_size) == (4, 8)
    assert copied.data_parallel_sizes == (6, 2)
    assert Plan.from_json(copied.to_json()) == copied
    assert "2 replicas x 2 stages (3-1 copies) = 8 devices" in copied.describe()
    assert "1, 2, 3" in copied.describe()


def test_a_file_from_before_stages_had_copies_is_read() -> None:
    old = json.loads(plan().to_json())
    assert old["version"] == VERSION
    # (earlier files have another number that follows)
    old |= {"version": 1, "data_parallel_sizes": [plan().replicas] * plan().stages}
    assert Plan.from_json(json.dumps(old)) == plan()


def test_a_file_from_when_operators_were_tried_is_read() -> None:
    old = json.loads(plan().to_json()) | {"tried": ["'own'"]}
    assert Plan.from_json(json.dumps(old)) == plan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": (1, 0)}, r"ranks\(1, 0\) must name each of 0..\d once, .* begin with 0"),
        ({"devices": ((1, 1), 0)}, r"devices\(\(1, 1\), 0\): where a stage has copies"),
        ({"devices": ((0, 1), 2)}, "end with 0"),
        (
            {"devices": ((1, 2), 0), "schedule": "1f1b_stream"},
            "need schedule 'gpipe' or 'zero_bubble'",
        ),
        ({"stages": 1, "cuts": (), "devices": ((0, 1),)}, r"copies\(2,\) .* are replicas"),
    ],
)
def test_copies_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    fields = {
        "replicas": 1,
        "stages": 2,
        "microbatches": 2,
        "schedule": "gpipe",
        "cuts": ("b",),
        **changes,
    }
    with pytest.raises(PlanError, match=message):
        Plan(**fields)
