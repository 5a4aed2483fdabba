"""The time from batch to batch under streamed schedules equals that of their orders on clocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import Part, Work, streamed
from timed_orders import ends_of_orders

from lightning_hybrid.planning.step_time import StepCosts, batch_s
from lightning_hybrid.schedules import STREAMED

BATCHES, FULL, PERIOD = 108, 36, 60  # cycles of up to 6 batches repeat within the period
seconds = st.floats(0.1, 3.0)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([*STREAMED]), st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_batch_takes_as_long_as_on_clocks(
    name: str, stages: int, microbatches: int, data: st.DataObject
) -> None:
    def drawn(count: int) -> list[float]:
        return data.draw(st.lists(seconds, min_size=count, max_size=count))

    costs = StepCosts(
        forward_s=drawn(stages),
        backward_s=drawn(stages),
        devices=[*range(stages)],
        send_s=drawn(stages - 1),
        latency_s=drawn(stages - 1),
        reduce_s=drawn(stages),
        step_s=drawn(stages),
    )
    rest_s = [
        max(0.0, r - b) + s for r, b, s in zip(costs.reduce_s, costs.backward_s, costs.step_s)
    ]
    done_s = ends_of_orders(
        streamed(STREAMED[name], stages, BATCHES),
        [microbatches * f for f in costs.forward_s],
        [microbatches * b + rest for b, rest in zip(costs.backward_s, rest_s)],
        send_s=[microbatches * s + late for s, late in zip(costs.send_s, costs.latency_s)],
    )
    begun_s, ended_s = (done_s[0, Work(Part.BACKWARD, n)] for n in (FULL, FULL + PERIOD))
    assert batch_s(STREAMED[name], costs, microbatches) == pytest.approx(
        (ended_s - begun_s) / PERIOD, rel=1e-9
    )
