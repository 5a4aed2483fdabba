"""Bubble and memory of the classic orders equal their closed forms."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import Part, Work, fill_drain, one_f_one_b, zero_bubble
from planned import simulate
from timed_orders import time_orders

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules.gpipe import gpipe

stages_ = st.integers(1, 7)
times_ = st.floats(0.5, 2.0)


def equal(value: float, stages: int) -> list[float]:
    return [value] * stages


@settings(max_examples=60)
@given(stages_, st.integers(1, 12), times_, times_)
def test_fill_drain_has_its_bubble_and_holds_all(p: int, m: int, f: float, b: float) -> None:
    found = time_orders(fill_drain(p, m), equal(f, p), equal(b, p))
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert found.in_flight == (m,) * p
    assert found.makespan_s == pytest.approx(
        simulate(gpipe(p, m), equal(f, p), equal(b, p)).makespan_s
    )


@settings(max_examples=60)
@given(stages_, st.integers(0, 12), times_, times_)
def test_1f1b_has_the_same_bubble_and_holds_as_many_as_stages_follow(
    p: int, more: int, f: float, b: float
) -> None:
    m = p + more
    found = time_orders(one_f_one_b(p, m), equal(f, p), equal(b, p))
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert found.in_flight == tuple(p - k for k in range(p))


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8)])
def test_v_stages_a_device_divide_the_bubble_by_v(p: int, m: int, v: int) -> None:
    stages = p * v
    devices = [k % p for k in range(stages)]
    timeline = simulate(gpipe(stages, m), equal(1 / v, stages), equal(2 / v, stages),
                        devices=devices)  # fmt: skip
    assert timeline.makespan_s - 3 * m == pytest.approx(3 * (p - 1) / v)


@settings(max_examples=60)
@given(stages_, st.integers(0, 9), times_, st.floats(0.0, 0.3), st.floats(0.0, 0.3))
def test_zb_h1_fills_the_bubble_with_weight_gradients(
    p: int, more: int, f: float, longer: float, shorter: float
) -> None:
    b, w, m = f * (1 + longer), f * (1 - shorter), 2 * p + more
    found = time_orders(zero_bubble(p, m), equal(f, p), equal(b, p), equal(w, p))
    assert found.makespan_s - m * (f + b + w) == pytest.approx((p - 1) * (f + b - w))
    assert max(found.in_flight) == p


@settings(max_examples=60)
@given(stages_, st.integers(0, 9), times_, st.floats(0.0, 0.2))
def test_zb_h2_has_no_bubble_where_times_are_equal(
    p: int, more: int, f: float, difference: float
) -> None:
    b, w, m = f * (1 + difference), f * (1 - difference), 2 * p + more
    found = time_orders(zero_bubble(p, m, ahead=2), equal(f, p), equal(b, p), equal(w, p))
    bubble_s = max(found.spans_s) - m * (f + b + w)
    assert bubble_s == pytest.approx((p - 1) * (f + b - 2 * w), abs=1e-9)
    assert max(found.in_flight) == 2 * p - 1


def spelled(orders: Any) -> list[str]:
    return [" ".join(map(str, order)) for order in orders]


def test_the_orders_look_as_they_are_drawn() -> None:
    assert spelled(one_f_one_b(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert spelled(zero_bubble(2, 3)) == [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]


def test_results_arrive_after_they_were_sent() -> None:
    found = time_orders(one_f_one_b(2, 1), [1.0, 1.0], [2.0, 2.0], send_s=[5.0])
    assert found.makespan_s == 1 + 5 + 1 + 2 + 5 + 2


def test_an_order_that_waits_for_ever_is_refused() -> None:
    stuck = ((Work(Part.BACKWARD, 0), Work(Part.FORWARD, 0)), (Work(Part.FORWARD, 0),))
    with pytest.raises(PlanError, match="stage 0 at B0, stage 1 at F0"):
        time_orders(stuck, [1.0] * 2, [1.0] * 2)
    with pytest.raises(PlanError, match=r"ahead\(3\) must be 1"):
        zero_bubble(2, 2, ahead=3)
    with pytest.raises(PlanError, match=r"microbatches\(0\)"):
        fill_drain(2, 0)
