"""What the user is told of networks, and how often."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.driver.announcements import Announcements
from lightning_hybrid.driver.found_network import FoundNetwork
from lightning_hybrid.planning.plan import Plan

PLAN = Plan(replicas=1, stages=2, microbatches=4, schedule="gpipe", cuts=("1",))


class Told:
    """Announcements of a run, and the lines."""

    def __init__(
        self, *, training: bool = True, compiled: bool = False, accumulates: bool = False
    ) -> None:
        self.lines: list[str] = []
        options: Any = SimpleNamespace(
            say=self.lines.append,
            trains=training,
            accumulates=accumulates,
            stages=SimpleNamespace(compiled=compiled),
        )
        self.announcements = Announcements(options)


def found(module: nn.Module, name: str = "net") -> FoundNetwork:
    capture: Any = SimpleNamespace(reason=None)
    nothing: Any = None
    found = FoundNetwork(name, module, module.forward, nothing, True, "")
    found.capture = capture
    return found


def test_a_line_of_an_earlier_run_is_not_said_again() -> None:
    fit, test, network = Told(), Told(training=False), found(nn.Linear(2, 2))
    for told in (fit, test):
        told.announcements.takes_batches_whole(network, "it sorts the batch")
    test.announcements.takes_batches_whole(network, "it draws")
    assert [line.rpartition(": ")[2] for line in fit.lines] == ["it sorts the batch."]
    assert [line.rpartition(": ")[2] for line in test.lines] == ["it draws."]


def test_a_line_is_said_once_for_each_network() -> None:
    told, one, two = Told(), found(nn.Linear(2, 2)), found(nn.Linear(2, 2), "")
    for network in (one, one, two):
        told.announcements.takes_batches_whole(network, "it sorts the batch")
    assert [line.split(" takes")[0] for line in told.lines] == [
        "Network 'net' (Linear)",
        "Network 'self' (Linear)",
    ]
    assert told.lines[0].endswith("how it is split: it sorts the batch.")


@pytest.mark.parametrize(
    ("how", "lines"),
    [("proof", []), ("proof, tail 1.0%", ["(proof, tail 1.0%): what needs all"])],
)
def test_what_is_computed_for_all_samples_is_told(how: str, lines: list[str]) -> None:
    told = Told()
    graph: Any = SimpleNamespace(split_by=how)
    told.announcements.say_it_is_split(found(nn.Linear(2, 2)), graph)
    assert len(told.lines) == len(lines)
    assert all(part in line for part, line in zip(lines, told.lines))


def test_a_number_that_grows_is_no_news() -> None:
    told, one = Told(), found(nn.Linear(2, 2))
    for reason in (None, "len(self.seen) == 1", "len(self.seen) == 2", "self.flag is True"):
        one.capture.reason = reason
        told.announcements.captured_again(one)
    assert [line.rpartition(": ")[2] for line in told.lines] == [
        "len(self.seen) == 1",
        "self.flag is True",
    ]


@pytest.mark.parametrize(
    ("module", "training", "lines"),
    [
        (nn.BatchNorm1d(2), True, 2),
        (nn.BatchNorm1d(2), False, 1),
        (nn.Linear(2, 2), True, 1),
    ],
)
def test_statistics_of_micro_batches_are_told_where_they_matter(
    module: nn.Module, training: bool, lines: int
) -> None:
    told = Told(training=training)
    told.announcements.planned(found(module), PLAN)
    assert len(told.lines) == lines
    assert lines == 1 or "statistics are those of a micro-batch (1/4 " in told.lines[1]


def test_a_delayed_schedule_says_in_training_what_it_trades() -> None:
    for schedule, training, lines in (
        ("fdg", True, 2),
        ("fdg", False, 1),
        ("1f1b_stream", True, 1),
    ):
        told = Told(training=training)
        plan = Plan(replicas=1, stages=3, microbatches=1, schedule=schedule, cuts=("1", "2"))
        told.announcements.planned(found(nn.Linear(2, 2)), plan)
        assert len(told.lines) == lines, schedule
        assert lines == 1 or "'fdg' is not exact: stage k of K runs on weights" in told.lines[1]
        assert lines == 1 or "(here 3, 1, 0)" in told.lines[1]


@pytest.mark.parametrize(
    ("reason", "alone", "line"),
    [
        (
            "takes no tensor",
            True,
            "Network 'net' (Linear) takes no tensor: it stays on the driver, as under ddp over the "
            "replicas.",
        ),
        (
            "takes no tensor",
            False,
            "Network 'net' (Linear) takes no tensor: it stays on the driver.",
        ),
        (
            "has\n  two lines",
            False,
            "Network 'net' (Linear) has\n  two lines\nIt stays on the driver.",
        ),
    ],
)
def test_a_network_that_stays_is_told_with_its_reason(reason: str, alone: bool, line: str) -> None:
    told = Told()
    told.announcements.stays("net", nn.Linear(2, 2), reason, alone=alone)
    assert told.lines == [line]


def test_who_accumulates_is_told_what_had_the_name_of_1f1b_before() -> None:
    for accumulates in (False, True):
        told = Told(accumulates=accumulates)
        told.announcements.backwards_follow(found(nn.Linear(2, 2)), "it returns no loss")
        [line] = told.lines
        assert "as under schedule='gpipe', since it returns no loss." in line
        assert ("'1f1b_stream'" in line) is accumulates


def compiled_in_place() -> nn.Module:
    network = nn.Sequential(nn.Linear(2, 2))
    network[0].compile(backend="eager")
    return network


@pytest.mark.parametrize(
    "module", [torch.compile(nn.Linear(2, 2), backend="eager"), compiled_in_place()]
)
def test_a_network_that_its_user_has_compiled_is_told_how_its_stages_are(module: nn.Module) -> None:
    for compiled in (False, True):
        told = Told(compiled=compiled)
        told.announcements.planned(found(module), PLAN)
        assert any("compile_stages=True" in line for line in told.lines) is not compiled
    told = Told()
    told.announcements.planned(found(nn.Linear(2, 2)), PLAN)
    assert not any("compile_stages" in line for line in told.lines)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("tensor 'args[0]' size mismatch at index 1. expected 5, actual 7", "pad the batches"),
        ("len(kwargs['past']) == 1 # if past: # net.py:10 in forward", "one tensor of all"),
        ("forward.__self__.scale == 1.0 # len(x) # net.py:8 in forward", "make it a tensor"),
        ("len(args) == 1 # return forward(*args, **kwargs) # capture.py:281", "each is captured"),
        ("not kwargs # return forward(*args, **kwargs) # capture.py:281", "each is captured"),
        ("2 <= args[0].size()[0] # if x is None: # net.py:8 (0/1 specialization)", "drop_last"),
    ],
)
def test_another_capture_is_told_with_what_to_do_about_it(reason: str, advice: str) -> None:
    told, one = Told(), found(nn.Linear(2, 2))
    one.capture.reason = reason
    told.announcements.captured_again(one)
    [line] = told.lines
    assert advice in line
    assert line.endswith(f": {reason}")
