"""Sizes that are left open are chosen before the run, and change nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Training

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).with_name("automatic_sizes_script.py")
OPEN: list[Any] = []
SCRIPTS: list[list[dict[str, Any]]] = [  # the jobs of each: a rank that has served drives no more
    [
        {"name": "tiny", "network": "tiny", "strategy": OPEN},
        {"name": "tiny given", "network": "tiny", "strategy": [2, 1]},
        {"name": "fails", "network": "fails", "strategy": OPEN},
        {"name": "after a failure", "network": "tiny", "strategy": OPEN},
    ],
    [
        {"name": "wide", "network": "wide", "strategy": OPEN},
        {"name": "wide given", "network": "wide", "strategy": "as chosen", "after": "wide"},
    ],
    [
        {"name": "plain", "network": "wide", "strategy": OPEN, "loader": "plain"},
        {"name": "plain given", "network": "wide", "strategy": "as chosen", "after": "plain"},
    ],
    [{"name": "once", "network": "tiny", "strategy": OPEN, "loader": "once"}],
    [{"name": "unpacks", "network": "unpacks", "strategy": OPEN}],
    [{"name": "meets", "network": "meets", "strategy": OPEN}],
    [{"name": "made", "network": "made", "strategy": OPEN}],
    [
        {"name": "cut points", "network": "tiny", "strategy": OPEN}
        | {"arguments": {"plan": ["net.1"]}}
    ],
    [
        {"name": "predicts first", "network": "tiny", "strategy": OPEN, "predicts first": True},
        {"name": "chain given", "network": "tiny", "strategy": [1, 2], "predicts first": True},
    ],
    [{"name": "asks before", "network": "tiny", "strategy": OPEN, "asks before": True}],
    [{"name": "in setup", "network": "tiny", "strategy": OPEN, "loader": "in setup"}],
    [{"name": "monitored", "network": "tiny", "strategy": OPEN, "monitors": True}],
    [{"name": "prepared", "network": "tiny", "strategy": OPEN, "loader": "prepared"}],
    [{"name": "prepared twice", "network": "tiny", "strategy": [2, 1], "loader": "prepared"}],
]
DDP = [{"name": "ddp", "network": "tiny", "strategy": "ddp"}]


class Seen:
    """What each driver has seen of a job: its script runs in two processes, once.

    Args:
        make_folder: for a script.
    """

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._done: dict[str, tuple[list[dict[str, Any]], str]] = {}

    def of(self, job: str) -> list[dict[str, Any]]:
        return [driver[job] for driver in self._script(job)[0]]

    def said(self, job: str) -> str:
        return "\n".join(self.of(job)[0]["said"])

    def printed(self, job: str) -> str:
        """What the job's script has printed, on all ranks."""
        return self._script(job)[1]

    def _script(self, job: str) -> tuple[list[dict[str, Any]], str]:
        if job not in self._done:
            jobs = next(s for s in (*SCRIPTS, DDP) if job in [each["name"] for each in s])
            folder = self._make_folder("sizes")
            training = Training(folder, script=SCRIPT, jobs=jobs, processes=2)
            done = training.run(), training.output
            self._done |= {each["name"]: done for each in jobs}
        return self._done[job]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp)


def assert_the_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "weights":
            assert all(torch.equal(found[name][n], w) for n, w in value.items()), name
        else:
            assert found[name] == value, name


def test_a_tiny_network_is_replicated_and_equals_ddp_digit_for_digit(seen: Seen) -> None:
    drivers = enumerate(zip(seen.of("tiny"), seen.of("ddp"), strict=True))
    for rank, (found, expected) in drivers:
        assert found["shape"] == (2, rank)
        assert_the_same(found["user"], expected["user"])
    said = seen.said("tiny")
    assert "Chosen for 2 devices: 2 replicas x 1 stage, 1 micro-batch. Predicted step: " in said
    assert "Next: 1 replica x 2 stages" in said


def test_the_sizes_that_are_announced_are_taken(seen: Seen) -> None:
    """By measured times, so that other work on the machine may change which of the two these are.

    (tests/planning/test_fastest_sizes.py chooses by given times.)
    """
    shapes = {"1 replica x 2 stages": [(1, 0)], "2 replicas": [(2, 0), (2, 1)]}
    [chosen] = [name for name in shapes if f"2 devices: {name}" in seen.said("wide")]
    [other] = shapes.keys() - {chosen}
    assert [driver["shape"] for driver in seen.of("wide")] == shapes[chosen]
    assert f"Next: {other}" in seen.said("wide")


@pytest.mark.conformance
@pytest.mark.parametrize("job", ["tiny", "wide"])
def test_all_a_script_sees_is_what_the_same_sizes_would_give(seen: Seen, job: str) -> None:
    """Losses, batches, reads, hooks, logs and later random numbers, on every driver."""
    for found, given in zip(seen.of(job), seen.of(f"{job} given"), strict=True):
        assert_the_same(found["user"], given["user"])


@pytest.mark.conformance
def test_one_micro_batch_has_a_line_that_names_the_operator(seen: Seen) -> None:
    assert "num_microbatches='auto' is 1: samples meet in 'mean'" in seen.said("meets")


@pytest.mark.conformance
def test_loaders_that_were_given_are_not_drawn_from(seen: Seen) -> None:
    plain, expected = (seen.of(job)[0]["user"] for job in ("plain", "plain given"))
    assert plain["losses"] == expected["losses"]
    assert plain["reads"] == expected["reads"]


@pytest.mark.parametrize(
    ("job", "why"),
    [
        pytest.param("once", "the train loader cannot be copied", marks=pytest.mark.conformance),
        ("unpacks", "has no attribute 'scale'"),
        pytest.param("made", "made in configure_model", marks=pytest.mark.conformance),
    ],
)
def test_where_nothing_can_be_known_all_devices_form_one_chain(
    seen: Seen, job: str, why: str
) -> None:
    [driver] = seen.of(job)
    assert driver["shape"] == (1, 0)
    [line] = [text for text in driver["said"] if "form one chain" in text]
    assert why in line
    assert len(driver["user"]["losses"]) == 6


@pytest.mark.conformance
def test_cut_points_are_for_a_chain_of_all_devices(seen: Seen) -> None:
    [driver] = seen.of("cut points")
    assert driver["shape"] == (1, 0)
    assert "Chosen" not in seen.said("cut points")


@pytest.mark.conformance
def test_a_run_that_does_not_train_makes_one_chain_of_those_that_follow(seen: Seen) -> None:
    """The tiny network would get two replicas."""
    [found], [expected] = seen.of("predicts first"), seen.of("chain given")
    assert found["shape"] == expected["shape"] == (1, 0)
    assert_the_same(found["user"], expected["user"])
    assert "this run does not train" in seen.said("predicts first")
    assert "Chosen" not in seen.said("predicts first")


def test_what_is_prepared_on_rank_0_alone_is_for_one_replica(seen: Seen) -> None:
    """The tiny network would get two."""
    [driver] = seen.of("prepared")
    assert driver["shape"] == (1, 0)
    assert len(driver["user"]["losses"]) == 6
    assert "set Prepared.made, Prepared.train on rank 0 alone" in seen.said("prepared")
    assert "so there is one" in seen.said("prepared")


@pytest.mark.conformance
def test_what_is_prepared_on_rank_0_alone_and_two_replicas_fail_as_under_ddp(seen: Seen) -> None:
    for driver in seen.of("prepared twice"):
        assert "no attribute 'train'" in driver["error"]
    assert "on rank 0 alone" in seen.said("prepared twice")


def test_a_rank_that_fails_before_sizes_are_known_ends_the_run_everywhere(seen: Seen) -> None:
    assert [rank["error"] for rank in seen.of("fails")] == ["this error is on purpose"] * 2
    for found, expected in zip(seen.of("after a failure"), seen.of("tiny"), strict=True):
        assert_the_same(found["user"], expected["user"])


@pytest.mark.conformance
@pytest.mark.parametrize("job", ["asks before", "in setup", "monitored"])
def test_the_number_of_replicas_that_was_told_before_sizes_were_chosen_stays_true(
    seen: Seen, job: str
) -> None:
    """The tiny network would get two; a process is told that it is in a chain of all."""
    [driver] = seen.of(job)
    assert driver["shape"] == (1, 0)
    assert "trainer.world_size was asked before" in seen.said(job)
    if job == "asks before":
        assert all(f"told before: {rank} of 1\n" in seen.printed(job) for rank in range(2))
