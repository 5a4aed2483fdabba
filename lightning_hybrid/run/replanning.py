"""New cuts at an epoch for a device that stays slower than planned (``replan="epoch"``).

All drivers measure the devices of their replicas, in windows of batches. When an epoch begins they
tell each other the last of these; a stage is as slow as the slowest device that has it. Replica 0
decides, and all hear. What follows from a decision is the session's matter.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import broadcast_object, gather_objects
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import Plan
from lightning_hybrid.run.device_times import Meter
from lightning_hybrid.run.plan_check import WINDOWS, BusyWindow, BusyWindows, Comparison
from lightning_hybrid.run.run import Run

WORTHWHILE = 1.1
"""So many times shorter the predicted step must be for new cuts. To cut anew costs some seconds,
and speeds of processors that are measured at two times differ by a tenth without any reason."""


class Replanning(BusyWindows):
    """Finds out whether stages should be cut at other places.

    Args:
        run: whose plans are in force.
        meter: see :class:`BusyWindows`.
        say: shows a line to the user, once for all replicas.
    """

    def __init__(self, run: Run, meter: Meter, say: Callable[[str], None]) -> None:
        super().__init__(run.plans, meter)
        self._run, self._say = run, say
        self._windows: deque[BusyWindow] = deque(maxlen=WINDOWS)
        self._epoch = run.trainer.current_epoch
        self._said: set[str] = set()
        self._why = ""  # of replica 0, for what is said of the decision

    def begin_anew(self) -> None:
        """What was measured before does not count."""
        super().begin_anew()
        self._windows = deque(maxlen=WINDOWS)

    def window_ends(self, plan: Plan, window: BusyWindow) -> None:
        """The last windows are kept."""
        self._windows.append(window)

    def new_plans(self) -> dict[str, Plan]:
        """At the start of a batch: the plans to go on with if others should be (collective).

        Empty: it is not the first batch of another epoch, or the plans in force are good enough.
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

    def tell(self, plans: Mapping[str, Plan], reason: str) -> None:
        """Say what becomes of new plans.

        Args:
            plans: that were found.
            reason: why they cannot be had; empty: they are in force from now on.
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
        if self.over or len(self._run.plans) != 1 or len(measured[0]) < WINDOWS:
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
    """Of replicas that train side by side."""
    busy_s = [max(column) for column in zip(*(window.busy_s for window in windows))]
    return BusyWindow(busy_s, max(window.wall_s for window in windows))


def _shown(plan: Plan) -> str:
    return ", ".join(map(repr, plan.cuts))
