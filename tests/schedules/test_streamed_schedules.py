"""Streamed schedules: their pictures, the batches they name, and how many they hold."""

import pytest
from orders import Part, Work, one_f_one_b, streamed
from timed_orders import time_orders

from lightning_hybrid.schedules import STREAMED


def drawn(name: str, stages: int, batches: int) -> list[str]:
    return [" ".join(map(str, order)) for order in streamed(STREAMED[name], stages, batches)]


def test_pipedream_looks_like_its_drawing() -> None:
    assert drawn("pipedream", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_fdg_looks_like_its_drawing() -> None:
    assert drawn("fdg", 3, 5) == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_a_window_of_1f1b_is_the_1f1b_of_as_many_micro_batches(stages: int, window: int) -> None:
    assert streamed(STREAMED["1f1b_stream"], stages, window) == one_f_one_b(stages, window)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_modules_of_fdg_run_the_batches_of_the_paper(stages: int) -> None:
    """Batch t - k + 1 forward and batch t - 2 K + k + 1 backward in iteration t of module k."""
    for k, order in enumerate(streamed(STREAMED["fdg"], stages, 40), 1):
        forward = [w.microbatch for w in order if w.part is Part.FORWARD]
        backward = [w.microbatch for w in order if w.part is Part.BACKWARD]
        # the last module steps, then forwards; all others go back, step, then forward
        first = 2 * (stages - k) if k < stages else 0
        for t in range(20):
            assert order.index(Work(Part.BACKWARD, t)) < order.index(
                Work(Part.FORWARD, t + first)
            ) or (k == stages)
            steps_between = sum(
                w.part is Part.BACKWARD
                for w in order[
                    order.index(Work(Part.FORWARD, t + first)) : order.index(
                        Work(Part.BACKWARD, t + first)
                    )
                ]
            )
            assert steps_between == max(0, first - 1)
        assert forward == backward == [*range(40)]


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_stage_holds_one_batch_more_than_it_looks_ahead(name: str, stages: int) -> None:
    schedule = STREAMED[name]
    found = time_orders(streamed(schedule, stages, 20), [1.0] * stages, [2.0] * stages)
    assert found.in_flight == tuple(a + 1 for a in schedule.look_aheads(stages))


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_equal_devices_are_never_idle_in_the_steady_state(name: str, stages: int) -> None:
    """One batch more takes one forward and one backward of a stage more."""
    schedule = STREAMED[name]
    shorter, longer = (
        time_orders(streamed(schedule, stages, n), [1.0] * stages, [2.0] * stages).makespan_s
        for n in (20, 30)
    )
    assert longer - shorter == pytest.approx(10 * 3.0)
