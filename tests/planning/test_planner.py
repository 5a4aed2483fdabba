"""From the costs of a network to its plan: what is chosen where memory binds."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.memory_check import ChainSizes
from lightning_hybrid.planning.memory_needed import held_in_training
from lightning_hybrid.planning.partition_table import PartitionTable, TiedWeight
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.planner import plan_within
from lightning_hybrid.planning.search import PlanSettings, Replica


def test_backwards_inside_of_calls_keep_as_many_micro_batches_as_stages() -> None:
    table = PartitionTable(
        forward_s=[1.0] * 2,
        backward_s=[2.0] * 2,
        cut_bytes=[8.0],
        kept_bytes=[100, 100],
        activation_bytes=[10, 20],
        gradient_bytes=[30, 40],
    )
    ways = [ChainSizes(stages=2, microbatches=m) for m in (1, 8)]
    inside = [held_in_training(table, PlanSettings(schedule="1f1b"), way) for way in ways]
    drained = held_in_training(table, PlanSettings(schedule="gpipe"), ways[1])
    assert [held.needed for held in inside] == [[140, 160], [150, 180]]
    assert (inside[1].most, drained.most, drained.needed) == (2, 8, [180, 260])


EVEN = PartitionTable(
    names=["a", "b"],
    parameters=[0, 0],
    layers=[1, 1],
    forward_s=[1.0] * 2,
    backward_s=[2.0] * 2,
    cut_bytes=[0.0],
    kept_bytes=[100] * 2,
    parameter_bytes=[40] * 2,
    gradient_bytes=[40] * 2,
    activation_bytes=[20] * 2,
    weight_part_s=[None] * 2,
    device="cpu",
)
COLUMNS = (
    *("parameters", "layers", "forward_s", "backward_s", "kept_bytes", "parameter_bytes"),
    *("gradient_bytes", "activation_bytes", "weight_part_s", "names", "cut_bytes"),
)


def twice(table: PartitionTable) -> PartitionTable:
    """Four equal partitions."""
    columns = {name: [*getattr(table, name)] * 2 for name in COLUMNS}
    return replace(table, **columns | {"names": list("abcd"), "cut_bytes": [0.0] * 3})


def test_what_fits_only_with_backwards_inside_of_calls_is_planned_so() -> None:
    replica = Replica(stages=2, microbatches=8, memory_limits=(185, 185))
    inside = plan_within(EVEN, PlanSettings(schedule="1f1b", recompute=False), replica, 8)
    assert [row.memory_bytes for row in inside.rows] == [100 + 2 * 20 + 40] * 2
    with pytest.raises(PlanError, match="micro-batches and schedule='1f1b', if the network"):
        plan_within(EVEN, PlanSettings(schedule="auto", recompute=False), replica, 8)


def chosen(table: PartitionTable, replica: Replica, **settings: Any) -> Plan:
    """The plan of `auto`, for a network that returns its loss."""
    return plan_within(table, PlanSettings(schedule="auto", **settings), replica, 8, inside=replica)


def test_auto_takes_backwards_inside_of_calls_where_nothing_else_fits() -> None:
    tight = Replica(stages=2, microbatches=8, memory_limits=(185, 185))
    assert chosen(EVEN, tight, recompute=False).schedule == "1f1b"
    one = replace(tight, microbatches=1)
    assert chosen(EVEN, one, recompute=False).schedule == "gpipe"
    with pytest.raises(PlanError, match="micro-batches held"):  # what lacks under fill-drain
        chosen(EVEN, replace(tight, memory_limits=(175, 175)), recompute=False)


def test_auto_takes_them_where_other_schedules_would_compute_activations_again() -> None:
    tight = Replica(stages=2, microbatches=8, memory_limits=(185, 185))
    inside = chosen(EVEN, tight)
    assert (inside.schedule, inside.recompute) == ("1f1b", False)
    drained = plan_within(EVEN, PlanSettings(schedule="auto"), tight, 8)
    assert (drained.schedule, drained.recompute) == ("gpipe", True)
    assert inside.step_s < 0.95 * drained.step_s


def test_auto_leaves_outputs_readable_after_the_step_where_memory_has_room() -> None:
    """Split backwards inside of calls would be shorter: of four equal stages (3 M + S - 1) F."""
    roomy = Replica(stages=4, microbatches=8)
    split = replace(twice(EVEN), input_part_s=[1.0] * 4, weight_part_s=[1.0] * 4)
    asked = plan_within(split, PlanSettings(schedule="1f1b"), roomy, 8)
    assert (asked.schedule, asked.split, asked.step_s) == ("1f1b", (1, 2, 3), 27.0)
    assert chosen(split, roomy).schedule in ("gpipe", "zero_bubble")


def test_backwards_inside_of_calls_run_in_loops_where_these_are_faster() -> None:
    table = twice(EVEN)
    replica = Replica(stages=2, microbatches=4)
    plan = plan_within(table, PlanSettings(schedule="1f1b", contiguous=False), replica)
    assert plan.devices == (1, 0, 1, 0)
    assert plan.step_s == (4 + 1 / 2) * 2 * 3  # (M + (S - 1) / v) (F + B)
    # two devices begin with five forwards of a half each
    assert [row.memory_bytes for row in plan.rows] == [100 + 3 * 20 + 40] * 4
    slow = replace(replica, bandwidth_bytes_per_s=1.0, latency_s=3.0)
    plan = plan_within(table, PlanSettings(schedule="1f1b", contiguous=False), slow)
    assert (plan.devices, plan.schedule) == ((1, 0), "1f1b")


def test_a_rank_that_borrows_a_weight_keeps_two_gradients_of_it() -> None:
    tied = TiedWeight(size_bytes=8, partitions=(0, 1), copy_bytes=16)
    table = PartitionTable(forward_s=[1.0] * 2, backward_s=[2.0] * 2, cut_bytes=[8.0], tied=[tied])
    assert [w.copy_bytes for w in table.with_copies_aside().tied] == [8 + 2 * 8]
    frozen = replace(table, tied=[replace(tied, copy_bytes=8)])
    assert frozen.with_copies_aside() == frozen
