"""The step time of fill-drain with copies of stages: that of `simulate_dealt`, computed faster."""

from functools import lru_cache

from lightning_hybrid.planning.simulate import DealtCosts, Order, dealt_order, simulate_order
from lightning_hybrid.schedules import Copy, collected, deal, make_schedule


def dealt_s(costs: DealtCosts, microbatches: int) -> float:
    """Seconds of one step of fill-drain, from the first forward to the last optimizer step.

    Equal to that of `simulate_dealt`. If messages go between neighbouring stages only, it is
    computed by a recurrence, without a simulation of events: searches call it thousands of times.
    """
    copies = costs.copies
    if copies[-1] > 1 or any(target.stage != source.stage + 1 for source, target in costs.edges):
        return simulate_order(_fill_drain(copies, microbatches), costs).makespan_s
    return _fill_drain_s(costs, copies, microbatches)


def _fill_drain_s(costs: DealtCosts, copies: tuple[int, ...], microbatches: int) -> float:
    stages = range(len(copies))
    # plain lists by stage and copy, which are several times faster than dicts
    clock_s = [[0.0] * count for count in copies]
    out_s = [[0.0] * count for count in copies]  # when the copy's last message has been sent
    last_s = [[0.0] * count for count in copies]  # when the copy's last computation began
    nothing = 0.0, 0.0
    for forward in (True, False):
        seconds = costs.forward_s if forward else costs.backward_s
        turn = 1 if forward else -1
        # a copy without a micro-batch does nothing in the backward: its REDUCE begins at once
        last_s = [[*clocks] for clocks in clock_s]
        for number in range(microbatches)[::turn]:
            arrived_s = 0.0
            for stage in stages[::turn]:
                copy = number % copies[stage]
                start_s = last_s[stage][copy] = max(clock_s[stage][copy], arrived_s)
                end_s = clock_s[stage][copy] = start_s + seconds[stage][copy]
                other = stage + turn
                # the first and last stage send to no other one in this direction
                if not 0 <= other < len(copies):
                    break
                ends = Copy(stage, copy), Copy(other, number % copies[other])
                send_s, latency_s = costs.edges.get(ends if forward else ends[::-1], nothing)
                if send_s:  # a message that takes no time does not wait for earlier ones
                    end_s = max(end_s, out_s[stage][copy])
                    out_s[stage][copy] = end_s + send_s
                arrived_s = end_s + send_s + latency_s
    return max(
        max(clock, max(last_s[stage]) + costs.reduce_s[stage]) + step
        for stage in stages
        for clock, step in zip(clock_s[stage], costs.step_s[stage])
    )


@lru_cache(maxsize=512)
def _fill_drain(copies: tuple[int, ...], microbatches: int) -> Order:
    stages = collected(copies)
    dealt = deal(make_schedule("gpipe", len(stages), microbatches), stages)
    return tuple(dealt_order(dealt, copies))
