"""Whether devices are as fast as their plan takes them to be, by what the first steps take.

A plan is made in a moment in which a machine may be busy with something else. Two windows of steps
are compared with it; if a device is behind in both, one line says so, with the speeds that were
found. Devices are compared with each other, since a network that is called twice in a step takes
twice as long everywhere.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_hybrid.planning import Plan
from lightning_hybrid.run.device_times import StepWatcher

FIRST = 3
"""Batches that are not looked at: networks are captured and caches filled in them."""
WINDOW = 10
"""Batches of a window."""
WINDOWS = 2
SLOWER = 1.5
"""So many times longer than planned, compared with the device that is nearest to its plan."""
OF_A_BATCH = 0.2
"""A device that is behind by a smaller share of a batch's time costs little."""


class PlanCheck(StepWatcher):
    """Says once if a device of replica 0 is persistently slower than planned.

    Args:
        plans: the plans in force, by network; filled as networks are cut.
        read_busy_s: gives the seconds that devices 1, 2, ... and 0 have computed since the last
            call.
        order: for each device of a replica, by `pp_rank`, its rank.
        say: shows a line to the user.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        read_busy_s: Callable[[], Sequence[float]],
        order: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        self._plans, self._read_busy_s, self._order, self._say = plans, read_busy_s, order, say
        self._batches = 0  # of the window, or before the first
        self._since: float | None = None
        self._windows = 0
        self._done = False

    def batch_starts(self, batch: Any) -> None:
        """A training batch is about to be trained on."""
        if self._done or not self._plans:
            return
        plan = self._only_plan()
        if plan is None:
            self._done = True
            return
        self._batches += 1
        if self._since is None:
            if self._batches > FIRST:
                self._begin()
        elif self._batches == WINDOW:
            self._look(plan, time.perf_counter() - self._since)

    def pause(self) -> None:
        """Forget the running window: validation starts, whose time is not that of training."""
        if self._since is not None:
            self._since, self._batches = None, FIRST

    def _begin(self) -> None:
        self._read_busy_s()
        self._batches, self._since = 0, time.perf_counter()

    def _only_plan(self) -> Plan | None:
        """The plan, if it says what its devices take and no other network keeps them busy."""
        [plan, *others] = self._plans.values()
        timed = plan.rows and all(row.backward_s is not None for row in plan.rows)
        return plan if timed and not others and plan.stages > 1 else None

    def _look(self, plan: Plan, wall_s: float) -> None:
        busy_s = self._read_busy_s()
        found = [share / WINDOW for share in (busy_s[-1], *busy_s[:-1])]  # device 0 first
        planned = planned_busy_s(plan)
        self._windows += 1
        if not min(*found, *planned) > 0:  # a device had nothing to do: nothing can be compared
            self._done = True
            return
        times = [a / b for a, b in zip(found, planned)]
        # several calls in a step make all devices take longer alike: only differences tell
        usual = min(times)
        behind = [a - usual * b for a, b in zip(found, planned)]
        worst = max(range(len(times)), key=behind.__getitem__)
        slow = times[worst] > SLOWER * usual and behind[worst] > OF_A_BATCH * wall_s / WINDOW
        self._done = not slow or self._windows == WINDOWS
        if not self._done:
            self._begin()
        elif slow:
            self._say(self._line(plan, worst, times, found))

    def _line(self, plan: Plan, worst: int, times: Sequence[float], found: Sequence[float]) -> str:
        usual = min(times)
        capacities = plan.capacities or (1.0,) * len(times)
        speeds = [round(c * usual / t, 2) for c, t in zip(capacities, times)]
        text = (
            f"Rank {self._order[worst]} is {times[worst] / usual:.1f} times slower, compared with "
            f"the others, than the plan takes it to be: it has computed for {found[worst]:.3g} s "
            f"per batch in {WINDOWS * WINDOW} batches. Other work may keep it busy."
        )
        # times are those of replica 0 alone, and speeds are wanted of all ranks
        if plan.replicas > 1:
            return text
        by_rank = [speed for _, speed in sorted(zip(self._order, speeds))]
        scaled = [round(speed / by_rank[0], 2) for speed in by_rank]
        return f"{text} If that lasts, a plan for these speeds is faster: device_capacity={scaled}."


def planned_busy_s(plan: Plan) -> list[float]:
    """Seconds that each device is to compute per batch, by its index in the replica."""
    seconds = [0.0] * plan.devices_per_replica
    for copies, row in zip(plan.owners, plan.rows):
        of_each = (row.forward_s or 0.0) + (row.backward_s or 0.0)
        for turn, device in enumerate(copies):
            seconds[device] += len(range(turn, plan.microbatches, len(copies))) * of_each
    return seconds
