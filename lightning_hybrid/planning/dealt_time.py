"""Predict the step time of fill-drain with copies of stages, faster than `simulate_dealt` does."""

from lightning_hybrid.planning.simulate import DealtCosts
from lightning_hybrid.schedules import StageCopy

_NOTHING = 0.0, 0.0


def dealt_s(costs: DealtCosts, microbatches: int) -> float:
    """Predict the seconds of a step of fill-drain if stages have copies.

    A step lasts from the first forward to the last optimizer step. The result equals that of
    `simulate_dealt`, but is computed by a recurrence and not by events, since searches call this
    function thousands of times. Messages go between neighbouring stages, and between copies of the
    last stage and the driver; the network's inputs take no time.

    Args:
        costs: times by stage and copy; backwards must not be split.
        microbatches: number of micro-batches, which copies take in turn.
    """
    copies = costs.copies
    edges = costs.edges
    last = len(costs.copies) - 1
    stages = range(len(copies))
    # plain lists by stage and copy, which are several times faster than dicts
    clock_s = [[0.0] * count for count in copies]
    out_s = [[0.0] * count for count in copies]  # when the copy's last message has been sent
    arrived_s = [0.0] * microbatches

    def sent(stage: int, copy: int, link: tuple[float, float], ready_s: float) -> float:
        """Send a message from a copy as soon as its link is free.

        Args:
            stage: number of the stage that sends.
            copy: number of its copy that sends.
            link: seconds for which the message occupies the link, and its latency in seconds.
            ready_s: the second at which the message is ready.

        Returns:
            The second at which the message arrives.
        """
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
            link = edges.get((StageCopy(stage, copy), StageCopy(stage + 1, other)))
            if link is not None:
                now_s = sent(stage, copy, link, now_s)
        arrived_s[number] = now_s
    # the driver, which has the last copy, takes all outputs before it begins the backward
    clock_s[last][-1] = start_s = max(clock_s[last][-1], *arrived_s)
    last_s = [[*clocks] for clocks in clock_s]  # when the copy's last computation began
    for number in reversed(range(microbatches)):
        copy = number % copies[last]
        link = edges.get((StageCopy(last, copy), StageCopy(last + 1, 0)))
        arrived_s[number] = start_s if link is None else sent(last, copies[last] - 1, link, start_s)
    for number in reversed(range(microbatches)):
        now_s = arrived_s[number]
        for stage in reversed(stages):
            copy = number % copies[stage]
            begun_s = last_s[stage][copy] = max(clock_s[stage][copy], now_s)
            now_s = clock_s[stage][copy] = begun_s + costs.backward_s[stage][copy]
            if stage:
                ends = StageCopy(stage - 1, number % copies[stage - 1]), StageCopy(stage, copy)
                now_s = sent(stage, copy, edges.get(ends, _NOTHING), now_s)
    # a copy without a micro-batch does nothing in the backward: its REDUCE begins at once
    return max(
        max(clock, max(last_s[stage]) + costs.reduce_s[stage]) + step
        for stage in stages
        for clock, step in zip(clock_s[stage], costs.step_s[stage])
    )
