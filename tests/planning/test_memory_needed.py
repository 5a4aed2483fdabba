from dataclasses import replace

import pytest

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.memory_check import (
    ChainSizes,
    MemoryFit,
    TrainingMemory,
    check_memory,
)
from lightning_hybrid.planning.memory_needed import remaining
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan, StagePlan

GB = 10**9


def table() -> tuple[PartitionTable, list[int]]:
    found = PartitionTable(
        names=["stem", "head"],
        forward_s=[0.1] * 2,
        backward_s=[0.2] * 2,
        cut_bytes=[1],
        parameter_bytes=[GB] * 2,
        gradient_bytes=[GB] * 2,
        kept_bytes=[4 * GB] * 2,
        activation_bytes=[GB, 3 * GB],
    )
    return found, found.held_bytes(2)


def test_a_partition_larger_than_any_device_is_named() -> None:
    found, needed = table()
    assert needed == [6 * GB, 10 * GB]
    with pytest.raises(PlanError, match="network partition 'head' needs 10 GB") as error:
        check_memory(found, TrainingMemory(needed, 2), [8 * GB, 9 * GB])
    text = str(error.value)
    assert "optimizer 2 GB, activations 3 GB for each of 2 micro-batches" in text
    assert "the largest, device 1 of a replica, has 9 GB free" in text
    assert "Make the batch smaller" in text


def test_a_network_larger_than_all_devices_is_told_how_much_there_is() -> None:
    found, needed = table()
    with pytest.raises(PlanError, match="the network needs 16 GB") as error:
        check_memory(found, TrainingMemory(needed, 2), [11 * GB, 4 * GB])
    assert "2 devices of a replica have free together: 15 GB (11 GB, 4 GB)" in str(error.value)
    assert "more stages" in str(error.value)
    check_memory(found, TrainingMemory(needed, 2), [11 * GB, 6 * GB])


def test_a_chain_that_no_cut_makes_fit_is_told_what_lacks_where() -> None:
    found, _ = table()
    limits = [9 * GB, 8 * GB]  # 17 GB for 16, but the larger partition comes first, on device 1
    ways = ChainSizes(stages=2, microbatches=2)
    sizes = {"cut_bytes": [GB], "activation_bytes": [5 * GB, 3 * GB]}
    tried = [MemoryFit(way=ways, limits=limits, whole=replace(found, **sizes), batch=8)]
    with pytest.raises(PlanError, match="no chain of stages") as error:
        check_memory(
            found, TrainingMemory([9 * GB, 7 * GB], 2), limits, tried=tried, contiguous=True
        )
    text = str(error.value)
    assert "with 2 stages, 2 micro-batches, device 1 lacks 1 GB (it has 8 GB)" in text
    assert "It would fit with 2 stages, 2 micro-batches and recompute=True" in text
    assert "2 stages, 2 micro-batches, on 2 devices with 9 GB free" in text


def test_what_is_placed_already_is_taken_from_the_devices() -> None:
    rows = tuple(
        StagePlan(
            layers=1,
            partitions=("a",),
            parameters=1,
            load=0.5,
            device=device,
            memory_bytes=GB,
            cut_bytes=cut * GB,
        )
        for device, cut in ((1, 1), (0, 0))
    )
    plan = Plan(replicas=1, stages=2, microbatches=3, schedule="gpipe", cuts=("b",), rows=rows)
    assert remaining([4 * GB, 2 * GB], [plan]) == (3 * GB, GB)
    assert remaining([4 * GB, 2 * GB], [plan] * 3) == (GB, 0)
    # the inputs of three micro-batches are kept where activations are computed again
    assert remaining([5 * GB, 4 * GB], [replace(plan, recompute=True)]) == (GB, 0)
    assert remaining(None, [plan]) is None


def test_replicas_hold_their_gradients_a_second_time_to_average_them() -> None:
    found, needed = table()
    averaged = found.averaged()
    assert averaged.held_bytes(2) == [n + GB for n in needed]
    with pytest.raises(PlanError, match="gradients 1 GB, 1 GB to average them, optimizer 2 GB"):
        check_memory(averaged, TrainingMemory([7 * GB, 11 * GB], 2), [8 * GB, 9 * GB])
