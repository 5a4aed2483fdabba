"""All ranks look at their devices; twins that seem unequal are looked at again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from lightning_hybrid.comm import Group
from lightning_hybrid.planning.run_cluster import Device, make_cluster
from lightning_hybrid.process import device_survey

CPU = torch.device("cpu")
Survey = Callable[..., list[float]]


class Looks:
    """Two ranks of one host whose measures the test gives; this rank is the second.

    Attributes:
        speeds: of both ranks at a short and at a long look.
        asked: whether each look of this rank was a long one.
    """

    def __init__(self, short: tuple[float, float], long: tuple[float, float]) -> None:
        self.speeds = {False: short, True: long}
        self.asked: list[bool] = []

    def measure(self, _: torch.device, *, long: bool = False) -> tuple[float, float]:
        self.asked.append(long)
        return self.speeds[long][1], 1.0

    def gather(self, _: Group, mine: Device) -> list[Device]:
        first = self.speeds[self.asked[-1]][0] if self.asked else 0.0
        return [replace(mine, units_per_s=first), mine]


@pytest.fixture(name="survey")
def _survey(monkeypatch: pytest.MonkeyPatch) -> Survey:
    def seen(_: torch.device, speed: tuple[float, float] = (0.0, 0.0)) -> Device:
        device = Device(host="a", name="cpu", memory_bytes=None, cores=(0, 1), threads=1)
        return replace(device, units_per_s=speed[0], units_per_own_s=speed[1])

    def survey(looks: Looks, given: Any = None) -> list[float]:
        monkeypatch.setattr(device_survey, "meet", lambda _: None)
        monkeypatch.setattr(device_survey, "describe_device", seen)
        monkeypatch.setattr(device_survey, "measure_speed", looks.measure)
        monkeypatch.setattr(device_survey, "gather_objects", looks.gather)
        devices = device_survey.devices_of_all(cast(Group, None), CPU, given)
        cluster = make_cluster(devices, 1, 2, given)
        return list(cluster.capacities)

    return survey


def test_a_twin_that_is_slow_at_the_first_look_only_counts_as_equal(survey: Survey) -> None:
    looks = Looks(short=(1.65, 0.55), long=(1.2, 1.1))
    assert survey(looks) == [1.15, 1.15]
    assert looks.asked == [False, True]


def test_a_twin_that_is_slow_at_both_looks_is_slow(survey: Survey) -> None:
    assert survey(Looks(short=(1.65, 0.55), long=(1.6, 0.8))) == [1.6, 0.8]


def test_equal_twins_are_looked_at_once(survey: Survey) -> None:
    looks = Looks(short=(1.0, 0.9), long=(0.0, 0.0))
    assert survey(looks) == [0.95, 0.95]
    assert looks.asked == [False]


def test_given_speeds_are_not_measured(survey: Survey) -> None:
    looks = Looks(short=(0.0, 0.0), long=(0.0, 0.0))
    assert survey(looks, [1.0, 0.25]) == [1.0, 0.25]
    assert looks.asked == []
