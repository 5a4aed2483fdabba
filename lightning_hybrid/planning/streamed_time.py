"""What a batch takes under a streamed schedule, once the pipeline is full."""

from lightning_hybrid.planning.order_times import time_orders
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import LookAhead

_FULL, _MORE = 24, 12
"""Batches until the pipeline is full, and batches that are then timed."""


def batch_s(schedule: LookAhead, costs: StepCosts, microbatches: int) -> float:
    """Seconds from one batch to the next, in the steady state.

    The optimizer step is taken after each batch, and the all-reduce is not hidden: of 1F1B, which
    steps once per window, both are overestimates.

    Args:
        schedule: the schedule.
        costs: of the stages, each on a device of its own.
        microbatches: into how many each batch is split.
    """
    stages = len(costs.forward_s)
    none = (0.0,) * stages
    forward = [microbatches * f for f in costs.forward_s]
    backward = [
        microbatches * b + max(0.0, reduce - b) + step
        for b, reduce, step in zip(costs.backward_s, costs.reduce_s or none, costs.step_s or none)
    ]
    send = [
        s * microbatches + late for s, late in zip(costs.send_s or none, costs.latency_s or none)
    ]
    full, longer = (
        time_orders(
            schedule.orders(stages, batches), forward, backward, send_s=send[: stages - 1]
        ).makespan_s
        for batches in (_FULL, _FULL + _MORE)
    )
    return (longer - full) / _MORE
