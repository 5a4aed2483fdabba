"""New cuts when an epoch begins, if a device stays slower than planned (``replan="epoch"``).

All drivers measure the devices of their replicas, in windows of batches. When an epoch begins they
tell each other the last windows; a stage is as slow as the slowest device that has it. Replica 0
decides, and tells all drivers. The session then cuts the stages anew.
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
"""First batches that are not measured: networks are captured and caches filled in them."""
WINDOW = 10
"""Number of batches of a window."""
WINDOWS = 2
"""Number of windows in a row in which a device must be slow."""
SLOWER = 1.5
"""A device is slow if it takes more than so many times its planned time, where the time of the
device nearest to its plan counts as planned."""
OF_A_BATCH = 0.2
"""A device is slow only if it is behind its plan by more than this share of a batch's time."""

WORTH_NEW_CUTS = 1.1
"""New cuts are used only if the predicted step becomes so many times shorter. To cut anew costs
some seconds, and speeds of processors, measured twice, differ by a tenth without any reason."""


@dataclass(frozen=True)
class BusyWindow:
    """Measured times of a window of batches, as means of a batch.

    Attributes:
        busy_s: seconds that each device of a replica has computed, by ``pp_rank`` (the driver's
            device first).
        wall_s: seconds that have passed.
    """

    busy_s: Sequence[float]
    wall_s: float


@dataclass(frozen=True)
class Comparison:
    """The measured times of a window, compared with those of the plan.

    Attributes:
        times: how many times longer than planned each device has computed, by ``pp_rank``.
        device: ``pp_rank`` of the device that is most seconds behind its plan, where the device
            nearest to its plan counts as on time.
        is_slow: whether that device is so far behind that it matters.
    """

    times: Sequence[float]
    device: int
    is_slow: bool

    @classmethod
    def of(cls, plan: Plan, window: BusyWindow) -> "Comparison | None":
        """Compare the times of a window with a plan.

        Args:
            plan: the plan in force.
            window: the measured times.

        Returns:
            The comparison; ``None``: some device had nothing to do, so that none can be compared.
        """
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
        """How many times slower than planned ``device`` is, if the one nearest to its plan is 1."""
        return self.times[self.device] / min(self.times)

    def speeds(self, plan: Plan) -> list[float]:
        """Relative speeds of the devices by ``pp_rank``, as planned but corrected by the window.

        Args:
            plan: the plan in force.
        """
        capacities, usual = plan.capacities or (1.0,) * len(self.times), min(self.times)
        return [capacity * usual / time for capacity, time in zip(capacities, self.times)]


class Replanning(StepWatcher):
    """The part of a run that measures devices, and finds new cuts if one stays slower than planned.

    Devices are compared with each other, since a network that is called twice in a step takes twice
    as long on all of them.

    Args:
        run: the run, which has the plans in force.
        say: prints a line for the user, once for all replicas.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        super().__init__(run)
        self._say = say
        self._epoch = run.trainer.current_epoch
        self._said: set[str] = set()
        self._why = ""  # of replica 0, for what is said of the decision

    def begin_anew(self) -> None:
        """Forget what was measured so far."""
        self._batches = 0  # of the window, or before the first
        self._window = None
        self._windows: deque[BusyWindow] = deque(maxlen=WINDOWS)

    def batch_starts(self, batch: Any) -> None:
        """Count a training batch; if it fills the window of measurements, begin another window."""
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
        """Whether measured times can be compared: one network, with planned seconds per stage."""
        plans = [*self._run.plans.values()]
        timed = plans and all(row.backward_s is not None for row in plans[0].rows)
        return bool(timed and plans[0].rows and len(plans) == 1)

    def new_plans(self) -> dict[str, Plan]:
        """Return plans with new cuts, at the first batch of an epoch (collective over the drivers).

        Empty: the plans in force are good enough, or no new epoch has begun.
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
            plans: the new plans, by name of the network.
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
        """On replica 0, find plans for :meth:`new_plans`; tell the user why cuts stay, if they do.

        Args:
            measured: for each replica its last windows, the oldest first.
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
        if best.cuts == plan.cuts or now.step_s < WORTH_NEW_CUTS * best.step_s:
            self._keep(name, f"no other cuts make a step {WORTH_NEW_CUTS} times shorter")
            return {}
        self._why += (
            f", and a step is predicted to take {best.step_s:.3g} s instead of {now.step_s:.3g} s"
        )
        return {name: best}

    def _rank(self, measured: Sequence[Sequence[BusyWindow]], device: int) -> str:
        """Name, as ``rank N``, the slowest of the devices with the same place in their replicas.

        Args:
            measured: for each replica its last windows.
            device: the place, as ``pp_rank``.
        """
        here = self._run.world.coordinates
        of_replicas = [windows[-1].busy_s[device] for windows in measured]
        index = of_replicas.index(max(of_replicas)) * here.ranks_per_replica + device
        cluster = self._run.world.cluster
        return f"rank {index if cluster is None else cluster.order[index]}"


def _slowest(windows: Sequence[BusyWindow]) -> BusyWindow:
    """Merge windows of all replicas: for each ``pp_rank`` the time of the slowest replica's device.

    All replicas wait for the slowest device of a stage.
    """
    busy_s = [max(column) for column in zip(*(window.busy_s for window in windows))]
    return BusyWindow(busy_s, max(window.wall_s for window in windows))


def _shown(plan: Plan) -> str:
    return ", ".join(map(repr, plan.cuts))


def planned_busy_s(plan: Plan) -> list[float]:
    """Compute the planned seconds for which each device of a replica computes, by ``pp_rank``.

    They are for one batch of the replica.
    """
    seconds = [0.0] * plan.devices_per_replica
    for copies, row in zip(plan.owners, plan.rows):
        of_each = (row.forward_s or 0.0) + (row.backward_s or 0.0)
        for turn, device in enumerate(copies):
            seconds[device] += len(range(turn, plan.microbatches, len(copies))) * of_each
    return seconds
