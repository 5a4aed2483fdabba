"""The instruction lists of one rank, made once per number of micro-batches."""

from functools import lru_cache

from lightning_hybrid.schedules import Kind, Schedule, make_schedule, merge


@lru_cache(maxsize=256)
def schedule_of(
    name: str, stages: int, microbatches: int, input_gradient: bool, split: tuple[int, ...] = ()
) -> Schedule:
    return make_schedule(name, stages, microbatches, input_gradient=input_gradient, split=split)


Todo = tuple[tuple[int, Kind, int], ...]
"""What a rank does, in order: which of its stages, the instruction, micro-batch."""


@lru_cache(maxsize=256)
def lists_of(
    name: str,
    devices: tuple[int, ...],
    here: int,
    microbatches: int,
    input_gradient: bool,
    split: tuple[int, ...] = (),
) -> tuple[Todo, Todo]:
    """The forward and the backward list of the rank with this ``pp_rank``."""
    schedule = schedule_of(name, len(devices), microbatches, input_gradient, split)
    own = [stage for stage, device in enumerate(devices) if device == here]
    forward, backward = (
        tuple((own.index(stage), i.kind, i.microbatch) for stage, i in merged[here])
        for merged in (merge(lists, devices) for lists in (schedule.forward, schedule.backward))
    )
    return forward, backward
