"""The time of a whole step, fast: what `simulate` says of fill-drain, without its events.

Letters: S stages, M micro-batches, f_k and b_k seconds of forward and backward of stage k for one
micro-batch, c_k seconds in which such a message occupies the link after stage k, l_k its latency.

**Every stage on a device of its own.** Devices and links are then a row of servers that each take
constant time for a micro-batch, so that micro-batch m leaves server s after the sum of the times up
to s and m times the largest of them. With c_-1 the inputs' and sums over what lies in between ::

    forward   T = sum(f) + sum(c + l) + (M - 1) max(f, c)
    backward  E_k = T + u + sum_{i >= k} b_i + sum_{i >= k} (c_i + l_i) + (M - 1) max_{i >= k}(b, c)
    step      max_k ( max(E_k, E_k - b_k + reduce_k) + step_k )

where u is what the driver does between the passes. The all-reduce of a stage runs beside its last
backward. That takes O(S): where only a cut moves, there is nothing left to save. A stage whose
backward is split hands a micro-batch on after b_k and takes the next one after b_k + w_k: w_k is
in the maximum and not in the sum, and the stage ends w_k later, beside which its gradients travel.

**Stages that share devices** (loops, free placements) take turns in the order of their ticks, see
`schedules.merged`. The recursion goes through the (stage, micro-batch) pairs in that order: O(S M).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.errors import PlanError


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the parts of a step take, by stage. All in seconds.

    Attributes:
        forward_s: (S,) forward of one micro-batch.
        backward_s: (S,) its backward.
        devices: (S,) device of each stage, counted from 0; the last stage is the driver's.
        send_s: (S - 1,) how long a micro-batch occupies the link after a stage, in either
            direction; empty: no time.
        latency_s: (S - 1,) how much later it is there; empty: no time.
        reduce_s: (S,) all-reduce of the gradients of a stage over its replicas; empty: no time.
        step_s: (S,) optimizer step of a stage; empty: no time.
        input_s: how long a micro-batch of inputs occupies the link from the driver to stage 0.
        driver_s: what the driver does between forward and backward.
        weight_s: (S,) weight part of the backward where that is split, and then `backward_s` is its
            input part; 0: not split. Empty: none is. For stages that have a device each.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    devices: Sequence[int]
    send_s: Sequence[float] = ()
    latency_s: Sequence[float] = ()
    reduce_s: Sequence[float] = ()
    step_s: Sequence[float] = ()
    input_s: float = 0.0
    driver_s: float = 0.0
    weight_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        for name, count in (
            ("backward_s", stages),
            ("devices", stages),
            ("send_s", stages - 1),
            ("latency_s", stages - 1),
            ("reduce_s", stages),
            ("step_s", stages),
            ("weight_s", stages),
        ):
            given = getattr(self, name)
            if len(given) != count and (len(given) or name in ("backward_s", "devices")):
                raise PlanError(f"{name} has {len(given)} entries, {count} are needed: {given}")
        if any(self.weight_s) and len(set(self.devices)) < stages:
            raise PlanError(
                f"weight_s{tuple(self.weight_s)} splits backwards of stages that share devices, "
                f"{tuple(self.devices)}: give each stage a device of its own"
            )


def fill_drain_s(costs: StepCosts, microbatches: int) -> float:
    """Seconds of one step of fill-drain, from the first forward to the last optimizer step.

    The same as `simulate(gpipe(S, M), ...).makespan_s`, and with `weight_s` as that of
    `zero_bubble` with these stages split, without events, busy times and checks of
    the numbers: made to be called thousands of times.
    """
    stages = len(costs.forward_s)
    if len(set(costs.devices)) == stages:
        return _chain_s(costs, stages, microbatches)
    return _shared_s(costs, stages, microbatches)


def _chain_s(costs: StepCosts, stages: int, microbatches: int) -> float:
    more = microbatches - 1
    none = (0.0,) * stages
    send, latency = costs.send_s or none, costs.latency_s or none
    forward = backward = longest = 0.0
    if stages > 1:
        forward = longest = costs.input_s
    last = stages - 1
    for k, f in enumerate(costs.forward_s):
        forward += f
        longest = max(longest, f)
        if k < last:
            forward += send[k] + latency[k]
            longest = max(longest, send[k])
    start = forward + more * longest + costs.driver_s
    reduce, step, weight = costs.reduce_s or none, costs.step_s or none, costs.weight_s or none
    longest = finish = 0.0
    for k in range(last, -1, -1):
        b = costs.backward_s[k]
        if k < last:
            backward += send[k] + latency[k]
            longest = max(longest, send[k])
        backward += b
        w = weight[k]
        longest = max(longest, b + w)
        end = start + backward + more * longest + w
        finish = max(finish, max(end, end - (w or b) + reduce[k]) + step[k])
    return finish


def _shared_s(costs: StepCosts, stages: int, microbatches: int) -> float:
    devices, none = costs.devices, (0.0,) * stages
    count = max(devices) + 1
    clock = [0.0] * count
    free = [[0.0] * count for _ in range(count)]  # of the link from one device to another
    _forward(costs, stages, microbatches, clock, free)
    clock[devices[-1]] += costs.driver_s
    reduced = _backward(costs, stages, microbatches, clock, free)
    steps = [0.0] * count
    for device, seconds in zip(devices, costs.step_s or none):
        steps[device] += seconds
    return max(max(c, r) + s for c, r, s in zip(clock, reduced, steps))


def _forward(
    costs: StepCosts, stages: int, microbatches: int, clock: list[float], free: list[list[float]]
) -> None:
    devices, forward = costs.devices, costs.forward_s
    send, latency = costs.send_s or (0.0,) * stages, costs.latency_s or (0.0,) * stages
    last = stages - 1
    # `there` holds for each stage when the messages from the stage before it have arrived
    there = [[0.0] * microbatches for _ in range(stages)]
    if devices[0] != devices[last]:
        there[0] = [(m + 1) * costs.input_s for m in range(microbatches)]
        free[devices[last]][devices[0]] = microbatches * costs.input_s
    for tick in range(stages + microbatches - 1):
        for k in range(max(0, tick - microbatches + 1), min(last, tick) + 1):
            m, device = tick - k, devices[k]
            start = there[k][m]
            end = (start if start > clock[device] else clock[device]) + forward[k]
            clock[device] = end
            if k == last:
                continue
            target = devices[k + 1]
            if target != device:
                link = free[device]
                end = (end if end > link[target] else link[target]) + send[k]
                link[target] = end
                end += latency[k]
            there[k + 1][m] = end


def _backward(
    costs: StepCosts, stages: int, microbatches: int, clock: list[float], free: list[list[float]]
) -> list[float]:
    """Advance the clocks; returns when the all-reduces of each device are done."""
    devices, backward = costs.devices, costs.backward_s
    send, latency = costs.send_s or (0.0,) * stages, costs.latency_s or (0.0,) * stages
    reduce = costs.reduce_s or (0.0,) * stages
    last, reduced = stages - 1, [0.0] * len(clock)
    there = [[0.0] * microbatches for _ in range(stages)]
    for tick in range(stages + microbatches - 1):
        first = max(0, last - tick)
        for k in range(first, min(last, last - tick + microbatches - 1) + 1):
            j, device = tick - (last - k), devices[k]  # the j-th to arrive; the last is reduced
            start = there[k][j]
            if start < clock[device]:
                start = clock[device]
            if j == microbatches - 1:
                reduced[device] = max(start, reduced[device]) + reduce[k]
            end = clock[device] = start + backward[k]
            if k == 0:
                continue
            target = devices[k - 1]
            if target != device:
                link = free[device]
                end = (end if end > link[target] else link[target]) + send[k - 1]
                link[target] = end
                end += latency[k - 1]
            there[k - 1][j] = end
    return reduced
