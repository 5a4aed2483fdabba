"""New cuts at an epoch for a device that stays slower than planned (``replan="epoch"``).

All drivers measure the devices of their replicas, in windows of batches. When an epoch begins they
tell each other the last of these; a stage is as slow as the slowest device that has it. Replica 0
decides, and all hear. What follows from a decision is the session's matter.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import broadcast_object, gather_objects
from lightning_hybrid.errors import PlanError
from lightning_hybrid.parts.device_times import StepWatcher, Window
from lightning_hybrid.planning import Plan
from lightning_hybrid.run import Run

FIRST = 3
"""Batches that are not looked at: networks are captured and caches filled in them."""
WINDOW = 10
"""Batches of a window."""
WINDOWS = 2
"""So many windows a device must be slow in."""
SLOWER = 1.5
"""So many times longer than planned, compared with the device that is nearest to its plan."""
OF_A_BATCH = 0.2
"""A device that is behind by a smaller share of a batch's time costs little."""

WORTHWHILE = 1.1
"""So many times shorter the predicted step must be for new cuts. To cut anew costs some seconds,
and speeds of processors that are measured at two times differ by a tenth without any reason."""


@dataclass(frozen=True)
class BusyWindow:
    """Measured times of the batches of a window, per batch.

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
        """Speeds of the devices, by their index in the replica."""
        capacities, usual = plan.capacities or (1.0,) * len(self.times), min(self.times)
        return [capacity * usual / time for capacity, time in zip(capacities, self.times)]


class Replanning(StepWatcher):
    """Finds out whether stages should be cut at other places.

    Devices are compared with each other, since a network that is called twice in a step takes twice
    as long everywhere.

    Args:
        run: whose plans are in force.
        say: shows a line to the user, once for all replicas.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        super().__init__(run)
        self._say = say
        self._epoch = run.trainer.current_epoch
        self._said: set[str] = set()
        self._why = ""  # of replica 0, for what is said of the decision

    def begin_anew(self) -> None:
        """Forget all measurements so far."""
        self._batches = 0  # of the window, or before the first
        self._window = None
        self._windows: deque[BusyWindow] = deque(maxlen=WINDOWS)

    def batch_starts(self, batch: Any) -> None:
        """Measure one window of training batches after the other."""
        if not self._is_comparable:
            return
        self._batches += 1
        if self._batches <= (FIRST if self._window is None else WINDOW - 1):
            return
        if self._window is not None:
            self._window.pause()
            busy_s = [seconds / WINDOW for seconds in self._window.busy_s]
            wall_s = self._window.wall_s / WINDOW
            self._windows.append(BusyWindow([busy_s[-1], *busy_s[:-1]], wall_s))
        self._batches, self._window = 0, Window(self.busy_s)

    @property
    def _is_comparable(self) -> bool:
        """Whether there is one network, with the seconds of each of its stages."""
        plans = [*self._run.plans.values()]
        timed = plans and all(row.backward_s is not None for row in plans[0].rows)
        return bool(timed and plans[0].rows and len(plans) == 1)

    def new_plans(self) -> dict[str, Plan]:
        """At the first batch of another epoch: the plans to go on with (collective).

        Empty: the plans in force are good enough.
        """
        before, self._epoch = self._epoch, self._run.trainer.current_epoch
        if self._epoch == before:
            return {}
        drivers = self._run.world.mesh.drivers
        measured = gather_objects(drivers, [*self._windows])
        found: dict[str, Plan] = {}
        if self._run.world.coordinates.dp_rank == 0:
            found = self._decide(measured)
        # measured on one rank: all replicas must have the same cuts
        plans: dict[str, Plan] = broadcast_object(drivers, found)
        return plans

    def cuts_decided(self, plans: Mapping[str, Plan], reason: str) -> None:
        """Tell the user whether new plans are used.

        Args:
            plans: that were found.
            reason: why they cannot be used; empty: they are used from now on.
        """
        for name, plan in plans.items():
            if reason:
                self._keep(name, reason)
            else:
                self._say(
                    f"replan='epoch': network {name or 'self'!r} is cut before {_shown(plan)} from "
                    f"now on, and no longer before {_shown(self._run.plans[name])}: {self._why}."
                )

    def _keep(self, name: str, reason: str) -> None:
        # the same each epoch would be no news
        if reason not in self._said:
            self._said.add(reason)
            self._say(
                f"replan='epoch': network {name or 'self'!r} stays cut before "
                f"{_shown(self._run.plans[name])}, although {self._why}: {reason}."
            )

    def _decide(self, measured: Sequence[Sequence[BusyWindow]]) -> dict[str, Plan]:
        """On replica 0: see :meth:`new_plans`.

        Args:
            measured: by replica the last windows.
        """
        if len(self._run.plans) > 1 and "several" not in self._said:
            self._said.add("several")
            names = " and ".join(repr(name or "self") for name in self._run.plans)
            self._say(
                f"replan='epoch' leaves the cuts of {names} as they are: devices compute several "
                "networks, and what each of them takes is not known."
            )
        if not self._is_comparable or len(measured[0]) < WINDOWS:
            return {}
        [(name, plan)] = self._run.plans.items()
        slowest = [_slowest(windows) for windows in zip(*measured)]
        compared = [Comparison.of(plan, window) for window in slowest]
        slow = [found for found in compared if found is not None and found.is_slow]
        if len(slow) < WINDOWS or len({found.device for found in slow}) > 1:
            return {}
        found = slow[-1]
        self._why = (
            f"{self._rank(measured, found.device)} is {found.ratio:.1f} times slower, compared "
            "with the others, than planned"
        )
        try:
            with as_they_are():
                now, best = self._run.again[name](plan, found.speeds(plan))
        except PlanError as error:
            self._keep(name, f"with these speeds {error}")
            return {}
        if best.cuts == plan.cuts or now.step_s < WORTHWHILE * best.step_s:
            self._keep(name, f"no other cuts make a step {WORTHWHILE} times shorter")
            return {}
        self._why += (
            f", and a step is predicted to take {best.step_s:.3g} s instead of {now.step_s:.3g} s"
        )
        return {name: best}

    def _rank(self, measured: Sequence[Sequence[BusyWindow]], device: int) -> str:
        """The rank of the slowest of the devices that have the same stage."""
        here = self._run.world.coordinates
        of_replicas = [windows[-1].busy_s[device] for windows in measured]
        index = of_replicas.index(max(of_replicas)) * here.ranks_per_replica + device
        cluster = self._run.world.cluster
        return f"rank {index if cluster is None else cluster.order[index]}"


def _slowest(windows: Sequence[BusyWindow]) -> BusyWindow:
    """One window for all replicas: each device with the time of its slowest replica.

    All replicas wait for the slowest device of a stage.
    """
    busy_s = [max(column) for column in zip(*(window.busy_s for window in windows))]
    return BusyWindow(busy_s, max(window.wall_s for window in windows))


def _shown(plan: Plan) -> str:
    return ", ".join(map(repr, plan.cuts))


def planned_busy_s(plan: Plan) -> list[float]:
    """Planned seconds of computation of each device per batch, by its index in the replica."""
    seconds = [0.0] * plan.devices_per_replica
    for copies, row in zip(plan.owners, plan.rows):
        of_each = (row.forward_s or 0.0) + (row.backward_s or 0.0)
        for turn, device in enumerate(copies):
            seconds[device] += len(range(turn, plan.microbatches, len(copies))) * of_each
    return seconds
