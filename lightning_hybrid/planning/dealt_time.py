"""The step time of fill-drain with copies of stages, by a recurrence over the micro-batches.

A device that sends to several copies sends one message at a time, to whichever copy; and the
all-reduce of a stage's gradients begins when the last of its copies has begun its last backward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import Copy

Edge = tuple[Copy, Copy]
_NOTHING = 0.0, 0.0


@dataclass(frozen=True, kw_only=True)
class DealtCosts:
    """Times of the parts of a step whose stages have copies, in seconds.

    Attributes:
        forward_s: by stage and copy, forward of one micro-batch.
        backward_s: by stage and copy, backward of one micro-batch; if it is split, the input part.
        weight_s: by stage and copy, the weight part of a split backward; 0: not split.
        step_s: by stage and copy, the optimizer step.
        reduce_s: by stage, the all-reduce of its gradients over its copies in all replicas.
        edges: by the copies at both ends, in the direction of the forward pass: for how long the
            message of a micro-batch occupies the sender's link, and how much later it arrives.
            Gradients take the same times on their way back. Inputs go from the driver to copies of
            stage 0, outputs from copies of the last stage to the driver. Edges that are left out
            take no time.
    """

    forward_s: Sequence[Sequence[float]]
    backward_s: Sequence[Sequence[float]]
    weight_s: Sequence[Sequence[float]]
    step_s: Sequence[Sequence[float]]
    reduce_s: Sequence[float]
    edges: Mapping[Edge, tuple[float, float]] = field(default_factory=dict)

    @property
    def copies(self) -> tuple[int, ...]:
        """Number of copies of each stage."""
        return tuple(map(len, self.forward_s))

    @classmethod
    def alike(cls, costs: StepCosts, copies: Sequence[int]) -> "DealtCosts":
        """Costs in which the copies of a stage have equal times, from those of the stages.

        `costs.reduce_s` must be the all-reduces over the copies in all replicas.
        """

        def each(seconds: Sequence[float]) -> list[list[float]]:
            return [[value] * count for value, count in zip(seconds, copies)]

        return cls(
            forward_s=each(costs.forward_s),
            backward_s=each(costs.backward_s),
            weight_s=each(costs.weight_s),
            step_s=each(costs.step_s),
            reduce_s=costs.reduce_s,
            edges={
                (Copy(stage, i), Copy(stage + 1, j)): link
                for stage, link in enumerate(zip(costs.send_s, costs.latency_s))
                for i in range(copies[stage])
                for j in range(copies[stage + 1])
            },
        )


def dealt_s(costs: DealtCosts, microbatches: int) -> float:
    """Seconds of one step of fill-drain, from the first forward to the last optimizer step.

    Equal to that of the instruction lists run on clocks, but fast enough to be called thousands of
    times. Messages go between neighbouring stages, and between copies
    of the last one and the driver; inputs take no time.
    """
    copies, edges, last = costs.copies, costs.edges, len(costs.copies) - 1
    stages = range(len(copies))
    # plain lists by stage and copy, which are several times faster than dicts
    clock_s = [[0.0] * count for count in copies]
    out_s = [[0.0] * count for count in copies]  # when the copy's last message has been sent
    arrived_s = [0.0] * microbatches

    def sent(stage: int, copy: int, link: tuple[float, float], ready_s: float) -> float:
        """When a message arrives that a copy sends to whichever other one."""
        send_s, latency_s = link
        if send_s:  # a message that takes no time does not wait for earlier ones
            ready_s = max(ready_s, out_s[stage][copy])
            out_s[stage][copy] = ready_s + send_s
        return ready_s + send_s + latency_s

    for number in range(microbatches):
        now_s = 0.0
        for stage in stages:
            copy = number % copies[stage]
            now_s = max(clock_s[stage][copy], now_s) + costs.forward_s[stage][copy]
            clock_s[stage][copy] = now_s
            other = 0 if stage == last else number % copies[stage + 1]
            # only where the last stage has copies has it an edge to one behind it
            link = edges.get((Copy(stage, copy), Copy(stage + 1, other)))
            if link is not None:
                now_s = sent(stage, copy, link, now_s)
        arrived_s[number] = now_s
    # the driver, which has the last copy, takes all outputs before it begins the backward
    clock_s[last][-1] = start_s = max(clock_s[last][-1], *arrived_s)
    last_s = [[*clocks] for clocks in clock_s]  # when the copy's last computation began
    for number in reversed(range(microbatches)):
        copy = number % copies[last]
        link = edges.get((Copy(last, copy), Copy(last + 1, 0)))
        arrived_s[number] = start_s if link is None else sent(last, copies[last] - 1, link, start_s)
    for number in reversed(range(microbatches)):
        now_s = arrived_s[number]
        for stage in reversed(stages):
            copy = number % copies[stage]
            begun_s = last_s[stage][copy] = max(clock_s[stage][copy], now_s)
            now_s = clock_s[stage][copy] = begun_s + costs.backward_s[stage][copy]
            if stage:
                ends = Copy(stage - 1, number % copies[stage - 1]), Copy(stage, copy)
                now_s = sent(stage, copy, edges.get(ends, _NOTHING), now_s)
    # a copy without a micro-batch does nothing in the backward: its REDUCE begins at once
    return max(
        max(clock, max(last_s[stage]) + costs.reduce_s[stage]) + step
        for stage in stages
        for clock, step in zip(clock_s[stage], costs.step_s[stage])
    )
