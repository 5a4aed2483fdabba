"""What a rank of a plan takes at most, from the start of a run to its end, by hand."""

from dataclasses import replace

from lightning_hybrid.planning.memory_needed import (
    DRIVER_BYTES,
    WORKER_BYTES,
    RunMemory,
    with_peaks,
)
from lightning_hybrid.planning.plan import Plan, StagePlan

GB = 10**9


def plan(*held: int, cut: int = 0, microbatches: int = 3) -> Plan:
    """Stages that hold so many GB in a step."""
    names, devices = "abc"[: len(held)], [*range(1, len(held)), 0]
    rows = tuple(
        StagePlan(
            layers=1,
            partitions=(name,),
            parameters=1,
            load=1 / len(held),
            device=device,
            memory_bytes=size * GB,
            cut_bytes=cut * GB if device else 0,
        )
        for name, device, size in zip(names, devices, held)
    )
    return Plan(
        replicas=1,
        stages=len(held),
        microbatches=microbatches,
        schedule="gpipe",
        cuts=tuple(names[1:]),
        rows=rows,
    )


def life(start: int = 0, passing: int = 0, batch: int = 0) -> RunMemory:
    return RunMemory(
        start_bytes=start * GB,
        passing_bytes=dict.fromkeys("abc", passing * GB),
        batch_bytes=batch * GB,
        on_cpu=False,
    )


def peaks(found: Plan) -> list[float]:
    return [(row.peak_bytes or 0) / GB for row in found.rows]


def test_a_network_that_is_whole_at_the_start_may_be_the_peak() -> None:
    assert peaks(with_peaks(plan(5, 9), life(start=7), None)) == [7, 9]


def test_steps_hold_what_crosses_the_cuts_and_the_driver_the_batch() -> None:
    # the first of three stages has sent three micro-batches, and two gradients are on their way;
    # the last one receives alone
    found = with_peaks(plan(5, 5, 5, cut=1), life(batch=4), None)
    assert peaks(found) == [5 + 3 + 2, 5 + 3 + 2, 5 + 2 + 4]
    again = replace(plan(5, 5, 5, cut=1), recompute=True)
    assert peaks(with_peaks(again, life(), None)) == [10, 10 + 3, 7 + 3]


def test_a_step_holds_what_is_there_for_a_moment() -> None:
    assert peaks(with_peaks(plan(5, 6), life(passing=2), None)) == [7, 8]


def test_on_cpus_the_processes_take_of_the_same_memory() -> None:
    found = with_peaks(plan(5, 5), replace(life(start=7), on_cpu=True), None)
    assert [row.peak_bytes for row in found.rows] == [7 * GB + WORKER_BYTES, 7 * GB + DRIVER_BYTES]


def test_stages_of_one_device_are_added_up() -> None:
    looped = plan(2, 3, 4)
    rows = [replace(row, device=device) for row, device in zip(looped.rows, (0, 1, 0))]
    found = with_peaks(replace(looped, devices=(0, 1, 0), rows=tuple(rows)), life(), None)
    assert peaks(found) == [6, 3, 6]


def test_the_table_has_the_peak_beside_the_limit() -> None:
    found = with_peaks(plan(5, 9), life(), (20 * GB, 12 * GB))
    assert [row["memory"] for row in found.table()] == ["5.00 of 12 GB", "9.00 of 20 GB"]
    assert Plan.from_json(found.to_json()) == found
