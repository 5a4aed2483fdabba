"""When stages get other cuts, by what devices have computed; on made-up ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pipelines import ALONE

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.errors import PlanError
from lightning_hybrid.parts import device_times, replanning
from lightning_hybrid.parts.replanning import (
    FIRST,
    WINDOW,
    WORTH_NEW_CUTS,
    BusyWindow,
    Replanning,
    planned_busy_s,
)
from lightning_hybrid.planning.plan import Plan, StagePlan

CLOCK = SimpleNamespace(now=0.0, perf_counter=lambda: CLOCK.now)


@pytest.fixture(autouse=True)
def made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_times, "time", CLOCK)


def row(device: int, backward_s: float | None = 0.02) -> StagePlan:
    return StagePlan(
        layers=1,
        partitions=("a",),
        parameters=1,
        load=0.5,
        device=device,
        forward_s=0.01,
        backward_s=backward_s,
    )


def plan(cut: str = "b", step_s: float = 1.0, device_0: float = 1.0, device_1: float = 1.0) -> Plan:
    """Two stages that compute 0.12 s per batch each."""
    rows = row(1), row(0)
    return Plan(
        replicas=1,
        stages=2,
        microbatches=4,
        schedule="gpipe",
        cuts=(cut,),
        rows=rows,
        predicted_step_s=step_s,
        capacities=(device_0, device_1),
    )


class Run:
    """A run of one driver, which plans as it is told, and what it has said."""

    def __init__(self, best: Plan | None = None, replicas: int = 1) -> None:
        self.lines: list[str] = []
        self.best, self.asked = best, list[list[float]]()
        self.trainer = SimpleNamespace(current_epoch=0)
        self.plans = {"net": plan()}
        self.again = {"net": self._again}
        here = Coordinates(0, replicas, 2)
        mesh = SimpleNamespace(drivers=ALONE)
        self.world = SimpleNamespace(coordinates=here, cluster=None, mesh=mesh)
        run: Any = self
        self.busy, self.begun = [0.0, 0.0], False
        # of the worker, and of the driver
        self.stopwatch = SimpleNamespace(read=lambda: self.busy[1])
        self.driver: Any = SimpleNamespace(reports=lambda _: [self.busy[0]])
        self.replanning = Replanning(run, self.lines.append)
        self.replanning.begin(self.driver)

    def _again(self, now: Plan, capacities: list[float]) -> tuple[Plan, Plan]:
        self.asked.append(capacities)
        if self.best is None:
            raise PlanError("nothing fits")
        return now, self.best

    def train(self, *windows: tuple[float, float]) -> None:
        """Windows in which devices 0 and 1 have computed for so many seconds a batch."""
        if not self.begun:
            self.begun = True
            for _ in range(FIRST + 1):
                self.replanning.batch_starts(None)
        for driver_s, worker_s in windows:
            for _ in range(WINDOW):
                CLOCK.now += 0.3
                self.busy = [self.busy[0] + worker_s, self.busy[1] + driver_s]
                self.replanning.batch_starts(None)

    def next_epoch(self) -> dict[str, Plan]:
        self.trainer.current_epoch += 1
        return self.replanning.new_plans()


SLOW, WELL = (0.12, 0.30), (0.12, 0.12)
BETTER = plan("a.b", 0.5)


def test_a_device_that_is_slow_in_the_last_windows_brings_other_cuts_at_the_next_epoch() -> None:
    run = Run(BETTER)
    run.train(WELL, SLOW, SLOW)
    assert run.replanning.new_plans() == {}  # in the same epoch
    assert run.next_epoch() == {"net": BETTER}
    assert run.asked == [[pytest.approx(1.0), pytest.approx(0.4)]]
    run.replanning.cuts_decided({"net": BETTER}, "")
    [line] = run.lines
    assert line == (
        "replan='epoch': network 'net' is cut before 'a.b' from now on, and no longer before 'b': "
        "rank 1 is 2.5 times slower, compared with the others, than planned, and a step is "
        "predicted to take 0.5 s instead of 1 s."
    )


@pytest.mark.parametrize(
    "windows",
    [
        [],
        [SLOW],
        [SLOW, WELL],
        [WELL, SLOW],
        [(0.12, 0.30), (0.30, 0.12)],  # another one each time
        [(0.30, 0.30), (0.30, 0.30)],  # a second call of the network
        [(0.0, 0.30), (0.0, 0.30)],  # one had nothing to do
    ],
)
def test_what_does_not_last_brings_none(windows: list[tuple[float, float]]) -> None:
    run = Run(BETTER)
    run.train(*windows)
    assert run.next_epoch() == {}
    assert not run.lines


@pytest.mark.parametrize(
    ("best", "reason"),
    [
        (plan("a.b", 1.01 / WORTH_NEW_CUTS), "no other cuts make a step 1.1 times shorter"),
        (plan("b", 0.1), "no other cuts"),
        (None, "with these speeds nothing fits"),
    ],
)
def test_cuts_that_gain_too_little_stay_and_that_is_said_once(
    best: Plan | None, reason: str
) -> None:
    run = Run(best)
    for _ in range(3):
        run.train(SLOW, SLOW)
        assert run.next_epoch() == {}
    [line] = run.lines
    assert "network 'net' stays cut before 'b', although rank 1 is 2.5 times slower" in line
    assert reason in line


def test_what_was_measured_under_other_cuts_does_not_count() -> None:
    run = Run(BETTER)
    run.train(SLOW, SLOW)
    run.replanning.begin(run.driver)
    run.begun = False
    run.train(SLOW)
    assert run.next_epoch() == {}


def test_a_stage_is_as_slow_as_its_slowest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(BETTER, replicas=2)
    other = [BusyWindow((0.12, 0.60), 0.7)] * 2
    monkeypatch.setattr(replanning, "gather_objects", lambda _, mine: [mine, other])
    run.train(WELL, WELL)
    assert run.next_epoch() == {"net": BETTER}
    assert run.asked == [[pytest.approx(1.0), pytest.approx(0.2)]]
    run.replanning.cuts_decided({"net": BETTER}, "'net.0' has another hook")
    assert "although rank 3 is 5.0 times slower" in run.lines[0]


def test_of_several_networks_cuts_stay_and_that_is_said_once() -> None:
    run = Run(BETTER)
    run.plans["other"] = replace(plan(), cuts=("c",))
    run.train(SLOW, SLOW)
    assert run.next_epoch() == run.next_epoch() == {}
    [line] = run.lines
    assert "leaves the cuts of 'net' and 'other' as they are" in line


def test_validation_is_no_training() -> None:
    run = Run(BETTER)
    run.train(WELL)
    run.replanning.pause()
    run.busy[0] += 100.0
    run.replanning.resume()
    run.train(WELL)
    assert run.next_epoch() == {}
    assert not run.lines


def test_without_the_seconds_of_each_stage_nothing_is_compared() -> None:
    for rows in ((), (row(1, None), row(0, None))):
        run = Run(BETTER)
        run.plans["net"] = replace(plan(), rows=rows)
        run.train(SLOW, SLOW)
        assert run.next_epoch() == {}


def test_a_device_with_several_stages_computes_all_of_them() -> None:
    looped = Plan(
        replicas=1,
        stages=4,
        microbatches=2,
        schedule="looped",
        cuts=("b", "c", "d"),
        devices=(1, 0, 1, 0),
        rows=tuple(row(device) for device in (1, 0, 1, 0)),
    )
    assert planned_busy_s(looped) == pytest.approx([0.12, 0.12])
