"""The simulated times of orders equal their closed forms."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.order_times import time_orders
from lightning_hybrid.planning.simulate import simulate
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.orders import Part, Work

stages_ = st.integers(1, 7)
times_ = st.floats(0.5, 2.0)


def equal(value: float, stages: int) -> list[float]:
    return [value] * stages


@settings(max_examples=60, deadline=None)
@given(stages_, st.integers(1, 12), times_, times_)
def test_fill_drain_takes_as_long_as_its_messages(p: int, m: int, f: float, b: float) -> None:
    forward = tuple(Work(Part.FORWARD, i) for i in range(m))
    backward = tuple(Work(Part.BACKWARD, i) for i in reversed(range(m)))
    found = time_orders((forward + backward,) * p, equal(f, p), equal(b, p))
    assert max(found.values()) == pytest.approx((m + p - 1) * (f + b))
    assert max(found.values()) == pytest.approx(
        simulate(gpipe(p, m), equal(f, p), equal(b, p)).makespan_s
    )


@settings(max_examples=60, deadline=None)
@given(stages_, st.integers(0, 12), times_, times_)
def test_1f1b_has_the_bubble_of_fill_drain(p: int, more: int, f: float, b: float) -> None:
    m = p + more
    found = time_orders(STREAMED["1f1b"].orders(p, m), equal(f, p), equal(b, p))
    assert max(found.values()) == pytest.approx((m + p - 1) * (f + b))


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8)])
def test_v_stages_a_device_divide_the_bubble_by_v(p: int, m: int, v: int) -> None:
    stages = p * v
    devices = [k % p for k in range(stages)]
    timeline = simulate(gpipe(stages, m), equal(1 / v, stages), equal(2 / v, stages),
                        devices=devices)  # fmt: skip
    assert timeline.makespan_s - 3 * m == pytest.approx(3 * (p - 1) / v)


def test_results_arrive_after_they_were_sent() -> None:
    found = time_orders(STREAMED["1f1b"].orders(2, 1), [1.0, 1.0], [2.0, 2.0], send_s=[5.0])
    assert max(found.values()) == 1 + 5 + 1 + 2 + 5 + 2


def test_an_order_that_waits_for_ever_is_refused() -> None:
    stuck = ((Work(Part.BACKWARD, 0), Work(Part.FORWARD, 0)), (Work(Part.FORWARD, 0),))
    with pytest.raises(PlanError, match="stage 0 at B0, stage 1 at F0"):
        time_orders(stuck, [1.0] * 2, [1.0] * 2)
