"""Whether devices are as fast as their plan takes them to be, by what the first steps take.

A plan is made in a moment in which a machine may be busy with something else. Two windows of steps
are compared with it; if a device is behind in both, one line says so, with the speeds that were
found. Devices are compared with each other, since a network that is called twice in a step takes
twice as long everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.planning import Plan
from lightning_hybrid.run.device_times import Meter, StepWatcher, Window

FIRST = 3
"""Batches that are not looked at: networks are captured and caches filled in them."""
WINDOW = 10
"""Batches of a window."""
WINDOWS = 2
SLOWER = 1.5
"""So many times longer than planned, compared with the device that is nearest to its plan."""
OF_A_BATCH = 0.2
"""A device that is behind by a smaller share of a batch's time costs little."""


@dataclass(frozen=True)
class BusyWindow:
    """What was measured in some batches, per batch.

    Attributes:
        busy_s: seconds that each device of a replica has computed, the driver's first.
        wall_s: seconds that passed.
    """

    busy_s: Sequence[float]
    wall_s: float


@dataclass(frozen=True)
class Comparison:
    """A window beside the plan.

    Attributes:
        times: how many times longer than planned each device has computed.
        device: the one that costs most by being behind the device that is nearest to its plan.
        is_slow: whether it is so far behind that it matters.
    """

    times: Sequence[float]
    device: int
    is_slow: bool

    @classmethod
    def of(cls, plan: Plan, window: BusyWindow) -> "Comparison | None":
        """``None``: a device had nothing to do, so that nothing can be compared."""
        found, planned = window.busy_s, planned_busy_s(plan)
        if not min(*found, *planned) > 0:
            return None
        times = [a / b for a, b in zip(found, planned)]
        # several calls in a step make all devices take longer alike: only differences tell
        usual = min(times)
        behind = [a - usual * b for a, b in zip(found, planned)]
        worst = max(range(len(times)), key=behind.__getitem__)
        slow = times[worst] > SLOWER * usual and behind[worst] > OF_A_BATCH * window.wall_s
        return cls(times, worst, slow)

    @property
    def ratio(self) -> float:
        """How many times slower that device is, compared with the others, than planned."""
        return self.times[self.device] / min(self.times)

    def speeds(self, plan: Plan) -> list[float]:
        """Those of the devices, by their index in the replica."""
        capacities, usual = plan.capacities or (1.0,) * len(self.times), min(self.times)
        return [capacity * usual / time for capacity, time in zip(capacities, self.times)]


class BusyWindows(StepWatcher):
    """Measures one window of training batches after the other.

    Args:
        plans: the plans in force, by network; filled as networks are cut.
        meter: of the devices of this replica.

    Attributes:
        over: whether nothing is measured any more.
    """

    def __init__(self, plans: Mapping[str, Plan], meter: Meter) -> None:
        self._plans, self._meter = plans, meter
        self.over = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """From now on stages are cut at other places, or it is the beginning."""
        self._batches = 0  # of the window, or before the first
        self._window = None

    def batch_starts(self, batch: Any) -> None:
        """A training batch is about to be trained on."""
        if self.over or not self._plans:
            return
        plan = self._only_plan()
        if plan is None:
            self.over = True
            return
        self._batches += 1
        if self._batches <= (FIRST if self._window is None else WINDOW - 1):
            return
        if self._window is not None:
            self._window.pause()
            busy_s = [seconds / WINDOW for seconds in self._window.busy_s]
            wall_s = self._window.wall_s / WINDOW
            self.window_ends(plan, BusyWindow([busy_s[-1], *busy_s[:-1]], wall_s))
        self._batches, self._window = 0, None if self.over else Window(self._meter)

    def window_ends(self, plan: Plan, window: BusyWindow) -> None:
        """A window is over.

        Args:
            plan: in force.
            window: what was measured.
        """
        raise NotImplementedError

    def _only_plan(self) -> Plan | None:
        """The plan of the run's only network, if it has several stages and the seconds of each."""
        [plan, *others] = self._plans.values()
        timed = plan.rows and all(row.backward_s is not None for row in plan.rows)
        return plan if timed and not others and plan.stages > 1 else None


class PlanCheck(BusyWindows):
    """Says once if a device of replica 0 is persistently slower than planned.

    Args:
        plans: see :class:`BusyWindows`.
        meter: see there.
        order: for each device of a replica, by `pp_rank`, its rank.
        say: shows a line to the user.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        meter: Meter,
        order: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(plans, meter)
        self._order, self._say = order, say
        self._windows = 0

    def window_ends(self, plan: Plan, window: BusyWindow) -> None:
        """Two windows are looked at."""
        self._windows += 1
        found = Comparison.of(plan, window)
        slow = found is not None and found.is_slow
        self.over = not slow or self._windows == WINDOWS
        if self.over and slow and found is not None:
            self._say(self._line(plan, found, window))

    def _line(self, plan: Plan, found: Comparison, window: BusyWindow) -> str:
        text = (
            f"Rank {self._order[found.device]} is {found.ratio:.1f} times slower, compared with "
            "the others, than the plan takes it to be: it has computed for "
            f"{window.busy_s[found.device]:.3g} s per batch in {WINDOWS * WINDOW} batches. Other "
            "work may keep it busy."
        )
        # times are those of replica 0 alone, and speeds are wanted of all ranks
        if plan.replicas > 1:
            return text
        speeds = [round(speed, 2) for speed in found.speeds(plan)]
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
