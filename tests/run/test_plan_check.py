"""A device that stays slower than its plan takes it to be is named once, and others are not."""

import pytest

from lightning_hybrid.planning.plan import Plan, StagePlan
from lightning_hybrid.run import device_times
from lightning_hybrid.run.device_times import BusyMeter, Window
from lightning_hybrid.run.plan_check import FIRST, WINDOW, WINDOWS, PlanCheck, planned_busy_s


def row(device: int, forward_s: float | None = 0.01, backward_s: float | None = 0.02) -> StagePlan:
    return StagePlan(
        layers=1,
        partitions=("a",),
        parameters=1,
        load=0.5,
        device=device,
        forward_s=forward_s,
        backward_s=backward_s,
    )


def plan(replicas: int = 1, **times: float | None) -> Plan:
    """Two stages that are to compute 0.12 s per batch each."""
    return Plan(
        replicas=replicas,
        stages=2,
        microbatches=4,
        schedule="gpipe",
        cuts=("b",),
        rows=(row(1, **times), row(0, **times)),
    )


class Steps:
    """Training on a made-up machine: seconds per batch of device 0 and device 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *plans: Plan) -> None:
        self.lines: list[str] = []
        self.busy, self.now = [0.0, 0.0], 0.0
        monkeypatch.setattr(device_times.time, "perf_counter", lambda: self.now)
        named = {str(number): one for number, one in enumerate(plans)}
        self.check = PlanCheck(named, self.read, (0, 1), self.lines.append)

    def read(self) -> list[float]:
        driver, worker = self.busy
        return [worker, driver]

    def run(self, batches: int, driver_s: float, worker_s: float) -> None:
        for _ in range(batches):
            self.check.batch_starts(None)
            self.now += driver_s + worker_s
            self.busy = [self.busy[0] + driver_s, self.busy[1] + worker_s]


ALL = FIRST + 1 + WINDOWS * WINDOW


def test_a_device_that_stays_behind_is_named_with_the_speeds_that_were_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, plan())
    steps.run(3 * ALL, 0.12, 0.30)
    [line] = steps.lines
    assert line.startswith("Rank 1 is 2.5 times slower")
    assert "device_capacity=[1.0, 0.4]" in line


def test_a_driver_that_stays_behind_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, plan())
    steps.run(ALL, 0.24, 0.12)
    assert "device_capacity=[1.0, 2.0]" in steps.lines[0]


@pytest.mark.parametrize(("driver_s", "worker_s"), [(0.12, 0.12), (0.4, 0.4), (0.14, 0.12)])
def test_devices_that_keep_to_the_plan_or_are_slower_together_are_not(
    monkeypatch: pytest.MonkeyPatch, driver_s: float, worker_s: float
) -> None:
    steps = Steps(monkeypatch, plan())
    steps.run(3 * ALL, driver_s, worker_s)
    assert not steps.lines


def test_a_burst_of_other_work_is_no_slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, plan())
    steps.run(FIRST + WINDOW, 0.12, 0.5)
    steps.run(3 * ALL, 0.12, 0.12)
    assert not steps.lines


def test_validation_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, plan())
    for _ in range(20):
        steps.run(5, 0.12, 0.12)
        steps.check.pause()
        steps.busy[1] += 100.0
        steps.check.resume()
    assert not steps.lines


NOTHING_KNOWN = [(), (plan(forward_s=None, backward_s=None),), (plan(), plan())]


@pytest.mark.parametrize("plans", NOTHING_KNOWN)
def test_without_one_plan_that_has_times_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, plans: tuple[Plan, ...]
) -> None:
    steps = Steps(monkeypatch, *plans)
    steps.run(3 * ALL, 0.12, 1.0)
    assert not steps.lines


@pytest.mark.parametrize(("driver_s", "worker_s"), [(0.0, 0.12), (0.0, 0.0)])
def test_a_device_that_had_nothing_to_do_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, driver_s: float, worker_s: float
) -> None:
    """A network may be left out of some steps."""
    steps = Steps(monkeypatch, plan())
    steps.run(3 * ALL, driver_s, worker_s)
    assert not steps.lines


def test_of_replicas_no_speeds_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, plan(replicas=2))
    steps.run(ALL, 0.12, 0.30)
    assert "device_capacity" not in steps.lines[0]


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


def test_windows_of_one_meter_see_the_same_seconds() -> None:
    new = iter([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    meter = BusyMeter(lambda: next(new)).read
    first, second = Window(meter), Window(meter)
    first.pause()
    second.pause()
    assert (first.busy_s, second.busy_s) == ([8.0, 10.0], [12.0, 14.0])
