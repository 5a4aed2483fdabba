"""Compute the time of a step of fill-drain by a formula, as `simulate` does by events, but faster.

Letters: S stages, M micro-batches, f_k and b_k seconds of forward and backward of stage k for one
micro-batch, c_k seconds for which the message of a micro-batch occupies the link after stage k, l_k
further seconds until it arrives (latency).

**Every stage on a device of its own.** Devices and links are then a row of servers that each take
constant time for a micro-batch, so that micro-batch m leaves server s after the sum of the times up
to s and m times the largest of them. With sums over what lies in between ::

    forward   T = sum(f) + sum(c + l) + (M - 1) max(f, c)
    backward  E_k = T + sum_{i >= k} b_i + sum_{i >= k} (c_i + l_i) + (M - 1) max_{i >= k}(b, c)
    step      max_k ( max(E_k, E_k - b_k + reduce_k) + step_k )

The all-reduce of a stage overlaps its last backward. This takes O(S). A stage whose backward is
split sends a micro-batch on after b_k and takes the next one after b_k + w_k, with w_k seconds for
the weight part: w_k is in the maximum and not in the sum, and the stage ends w_k later, which its
all-reduce overlaps.

**Stages that share devices** (looped schedules, free placements) take turns in the order of their
ticks, see `schedules.merged`. The recursion goes through the (stage, micro-batch) pairs in that
order: O(S M).

**Streamed schedules** have no step of their own: `batch_s` is the time from one batch to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import LookAhead

MARGIN = 0.05
"""Least fraction of the predicted step time that another schedule, or a split backward inside of a
call, must save to be chosen. Predictions are not more exact: they leave out the time between two
instructions, and those choices have more instructions."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Times of the parts of a step, for each of S stages, in seconds.

    Lists that are left empty are filled with zeros.

    Attributes:
        forward_s: (S,) forward of one micro-batch.
        backward_s: (S,) backward of one micro-batch.
        devices: (S,) device of each stage, counted from 0; the last stage is the driver's.
        send_s: (S - 1,) for how long the message of a micro-batch occupies the link after a stage,
            in either direction.
        latency_s: (S - 1,) further time until this message arrives.
        reduce_s: (S,) all-reduce of the gradients of a stage over its replicas.
        step_s: (S,) optimizer step of a stage.
        weight_s: (S,) weight part of a split backward; `backward_s` is then its input part. 0: not
            split. Only if no stages share a device.

    Raises:
        PlanError: a list has not one entry for each stage or cut, or a backward is split though
            stages share a device.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    devices: Sequence[int]
    send_s: Sequence[float] = ()
    latency_s: Sequence[float] = ()
    reduce_s: Sequence[float] = ()
    step_s: Sequence[float] = ()
    weight_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        for name in ("backward_s", "devices", *_MAY_BE_EMPTY):
            needed = stages - 1 if name in ("send_s", "latency_s") else stages
            given = getattr(self, name)
            if name in _MAY_BE_EMPTY and not len(given):
                object.__setattr__(self, name, (0.0,) * needed)
            elif len(given) != needed:
                raise PlanError(f"{name} has {len(given)} entries, {needed} are needed: {given}")
        # the formula for shared devices has no weight parts
        if any(self.weight_s) and len(set(self.devices)) < stages:
            raise PlanError(
                f"weight_s{tuple(self.weight_s)} splits backwards of stages that share devices, "
                f"{tuple(self.devices)}: give each stage a device of its own"
            )


_MAY_BE_EMPTY = ("send_s", "latency_s", "reduce_s", "step_s", "weight_s")
TIMES = ("forward_s", "backward_s", *_MAY_BE_EMPTY)
"""Names of the times in `StepCosts`; the rows of a plan (`StagePlan`) have times of these names
too."""


def fill_drain_s(costs: StepCosts, microbatches: int) -> float:
    """Predict the seconds of a fill-drain step, from the first forward to the last optimizer step.

    The result equals `simulate(gpipe(S, M), costs).makespan_s`; if stages have a `weight_s`, it is
    that of `zero_bubble` with these stages split. It is fast enough to be called thousands of
    times.

    Args:
        costs: times and devices of the stages.
        microbatches: number of micro-batches, M.
    """
    if len(set(costs.devices)) == len(costs.devices):
        return _chain_s(costs, microbatches)
    return _shared_s(costs, microbatches)


def _chain_s(costs: StepCosts, microbatches: int) -> float:
    """Predict the seconds of a step of fill-drain if every stage has its own device."""
    more = microbatches - 1
    crossing = sum(costs.send_s) + sum(costs.latency_s)
    # the first micro-batch takes the sum of all times, each further one their maximum
    start = sum(costs.forward_s) + crossing + more * max(*costs.forward_s, *costs.send_s, 0.0)
    backward = longest = finish = 0.0
    edges = (*zip(costs.send_s, costs.latency_s), (0.0, 0.0))
    stages = zip(costs.backward_s, costs.weight_s, costs.reduce_s, costs.step_s, edges)
    for b, w, reduce, step, (send, latency) in reversed(list(stages)):
        backward += send + latency + b
        longest = max(longest, send, b + w)
        end = start + backward + more * longest + w
        finish = max(finish, max(end, end - (w or b) + reduce) + step)
    return finish


def _shared_s(costs: StepCosts, microbatches: int) -> float:
    """Predict the seconds of a step of fill-drain if stages share devices."""
    there = range(len(costs.devices))
    back = there[::-1]
    clocks = _Clocks(costs, microbatches)
    clocks.run(costs.forward_s, there)
    last_start_s = clocks.run(costs.backward_s, back)
    # a device steps its optimizer when all of its stages have their gradients
    reduced, steps = [0.0] * clocks.devices, [0.0] * clocks.devices
    for stage in back:  # all-reduces of a device run one after the other
        device = costs.devices[stage]
        reduced[device] = max(last_start_s[stage], reduced[device]) + costs.reduce_s[stage]
        steps[device] += costs.step_s[stage]
    return max(max(c, r) + s for c, r, s in zip(clocks.device_s, reduced, steps))


class _Clocks:
    """The seconds at which devices and links are free again, if stages share devices.

    Args:
        costs: times and devices of the stages.
        microbatches: number of micro-batches.
    """

    def __init__(self, costs: StepCosts, microbatches: int) -> None:
        self.costs = costs
        self.microbatches = microbatches
        self.devices = max(costs.devices) + 1
        self.device_s = [0.0] * self.devices
        self.link_s = [[0.0] * self.devices for _ in self.device_s]  # from one device to another

    def run(self, seconds: Sequence[float], way: range) -> list[float]:
        """Simulate one pass of all micro-batches, forward or backward, and advance the clocks.

        Args:
            seconds: by stage, the seconds of a micro-batch.
            way: numbers of the stages in the order in which a micro-batch passes them.

        Returns:
            By stage, the second at which its last micro-batch begins.
        """
        device_s = self.device_s
        microbatches = self.microbatches
        last_start_s = [0.0] * len(way)
        arrived_s = [[0.0] * microbatches for _ in range(len(way) + 1)]
        places = [self._place(stage, stage + way.step, seconds[stage]) for stage in way]
        for tick in range(len(way) + microbatches - 1):
            ready = range(max(0, tick - microbatches + 1), min(len(way) - 1, tick) + 1)
            # within a tick a device runs its stages by rising number, in the backward too
            for place in ready[:: way.step]:
                device, taken_s, there, links, send_s, latency_s = places[place]
                number = tick - place
                start_s = arrived_s[place][number]
                if start_s < device_s[device]:
                    start_s = device_s[device]
                last_start_s[way[place]] = start_s
                end_s = device_s[device] = start_s + taken_s
                if there != device:
                    if end_s < links[there]:
                        end_s = links[there]
                    end_s += send_s
                    links[there] = end_s
                    end_s += latency_s
                arrived_s[place + 1][number] = end_s
        return last_start_s

    def _place(
        self, stage: int, target: int, taken_s: float
    ) -> tuple[int, float, int, list[float], float, float]:
        """Look up all that `run` needs of a stage.

        Args:
            stage: number of the stage.
            target: number of the stage that gets its messages; no stage has it: nothing is sent.
            taken_s: seconds that the stage takes for a micro-batch.

        Returns:
            The stage's device; `taken_s`; the target's device; by device, when the link to it from
            the stage's device is free; the seconds for which a message occupies that link; and its
            latency.
        """
        devices, cut = self.costs.devices, min(stage, target)
        here = devices[stage]
        if not 0 <= target < len(devices):  # the last stage of the pass sends nothing
            return here, taken_s, here, [], 0.0, 0.0
        sent = self.costs.send_s[cut], self.costs.latency_s[cut]
        return here, taken_s, devices[target], self.link_s[here], *sent


def batch_s(schedule: LookAhead, costs: StepCosts, microbatches: int) -> float:
    """Predict the seconds from one batch to the next of a streamed schedule, in the steady state.

    With its look-ahead a_k, stage k runs forward t after backward t - a_k - 1, and backward t after
    forward t + a_k. So at most a_k - a_j + 1 batches are at once on their way from stage k to a
    later stage j and back. This way there and back takes some time; divided by that number it is
    the least time from one batch to the next. The slowest of these cycles, over all k <= j, sets
    the pace of all (the maximum cycle mean; j = k is a stage that is always busy). Messages do not
    wait for each other here, as they do in `simulate`.

    All-reduce and optimizer step are counted for each batch. That is too much for ``1f1b_stream``,
    which steps once per accumulation window.

    Args:
        schedule: the schedule.
        costs: times of the stages, each on a device of its own.
        microbatches: number of micro-batches of each batch.
    """
    stages = range(len(costs.forward_s))
    ahead = schedule.look_aheads(len(stages))
    rows = zip(costs.forward_s, costs.backward_s, costs.reduce_s, costs.step_s)
    # the last micro-batch overlaps a part of the all-reduce
    busy_s = [microbatches * (f + b) + max(0.0, reduce - b) + step for f, b, reduce, step in rows]
    sent_s = [microbatches * send + late for send, late in zip(costs.send_s, costs.latency_s)]
    return max(
        (sum(busy_s[k : j + 1]) + 2 * sum(sent_s[k:j])) / (ahead[k] - ahead[j] + 1)
        for k in stages
        for j in stages[k:]
    )


def speedup(serial_s: float, parallel_s: float) -> float:
    """S = T_s / T_p (Akintoye et al. 2022, Eq. 14): how many times faster the same work is done.

    Args:
        serial_s: T_s, seconds of the work on one device.
        parallel_s: T_p, seconds of the same work on several devices.

    Raises:
        PlanError: a time is not positive.
    """
    for name, value in (("serial_s", serial_s), ("parallel_s", parallel_s)):
        if not value > 0:
            raise PlanError(f"{name} is {value}: a time of more than 0 s is needed")
    return serial_s / parallel_s
