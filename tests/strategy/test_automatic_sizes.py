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
JOBS = [
    {"name": "tiny", "network": "tiny", "strategy": OPEN},
    {"name": "tiny given", "network": "tiny", "strategy": [2, 1]},
    {"name": "wide", "network": "wide", "strategy": OPEN},
    {"name": "wide given", "network": "wide", "strategy": "as chosen"},
    {"name": "plain loader", "network": "wide", "strategy": OPEN, "loader": "plain"},
    {"name": "once", "network": "tiny", "strategy": OPEN, "loader": "once"},
    {"name": "unpacks", "network": "unpacks", "strategy": OPEN},
    {"name": "meets", "network": "meets", "strategy": OPEN},
    {"name": "made", "network": "made", "strategy": OPEN},
    {"name": "cut points", "network": "tiny", "strategy": OPEN}
    | {"arguments": {"plan": ["net.1"]}},
    {"name": "predicts first", "network": "tiny", "strategy": OPEN, "predicts first": True},
    {"name": "asks before", "network": "tiny", "strategy": OPEN, "asks before": True},
    {"name": "in setup", "network": "tiny", "strategy": OPEN, "loader": "in setup"},
    {"name": "monitored", "network": "tiny", "strategy": OPEN, "monitors": True},
    {"name": "prepared", "network": "tiny", "strategy": OPEN, "loader": "prepared"},
    {"name": "prepared twice", "network": "tiny", "strategy": [2, 1], "loader": "prepared"},
    {"name": "fails", "network": "fails", "strategy": OPEN},
    {"name": "after a failure", "network": "tiny", "strategy": OPEN},
]
for job in JOBS[3:4]:
    job["after"] = "wide"
DDP = [{"name": "tiny", "network": "tiny", "strategy": "ddp"}]
FAST = ("tiny", "wide", "unpacks", "prepared", "fails", "after a failure")
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Any]], Ranks]:
    """Run jobs in two processes."""
    return lambda jobs: Training(
        tmp_path_factory.mktemp("sizes"), script=SCRIPT, jobs=jobs, processes=2
    ).run()


@pytest.fixture(scope="module")
def ranks(run: Callable[[list[Any]], Ranks], request: pytest.FixtureRequest) -> Ranks:
    """All jobs, or those that the fast tier looks at."""
    slow = any(item.get_closest_marker("conformance") for item in request.session.items)
    return run(JOBS if slow else [job for job in JOBS if job["name"] in FAST])


def said(ranks: Ranks, job: str) -> str:
    return "\n".join(ranks[0][job]["said"])


def assert_the_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "weights":
            assert all(torch.equal(found[name][n], w) for n, w in value.items()), name
        else:
            assert found[name] == value, name


def test_a_tiny_network_is_replicated_and_equals_ddp_digit_for_digit(
    ranks: Ranks, run: Callable[[list[Any]], Ranks]
) -> None:
    for rank, expected in enumerate(run(DDP)):
        found = ranks[rank]["tiny"]
        assert found["shape"] == (2, rank)
        assert_the_same(found["user"], expected["tiny"]["user"])
    assert "Chosen for 2 devices: 2 replicas x 1 stage, 1 micro-batch. Predicted step: " in said(
        ranks, "tiny"
    )
    assert "Next: 1 replica x 2 stages" in said(ranks, "tiny")


def test_the_sizes_that_are_announced_are_taken(ranks: Ranks) -> None:
    """By measured times, so that other work on the machine may change which of the two these are.

    (tests/planning/test_fastest_sizes.py chooses by given times.)
    """
    shapes = {"1 replica x 2 stages": [(1, 0), (1, 1)], "2 replicas": [(2, 0), (2, 1)]}
    [chosen] = [name for name in shapes if f"2 devices: {name}" in said(ranks, "wide")]
    [other] = shapes.keys() - {chosen}
    assert [rank["wide"]["shape"] for rank in ranks] == shapes[chosen]
    assert f"Next: {other}" in said(ranks, "wide")


@pytest.mark.conformance
@pytest.mark.parametrize("job", ["tiny", "wide"])
def test_all_a_script_sees_is_what_the_same_sizes_would_give(ranks: Ranks, job: str) -> None:
    """Losses, batches, reads, hooks, logs and later random numbers, on every rank."""
    for rank in ranks:
        assert_the_same(rank[job]["user"], rank[f"{job} given"]["user"])


@pytest.mark.conformance
def test_one_micro_batch_has_a_line_that_names_the_operator(ranks: Ranks) -> None:
    assert "num_microbatches='auto' is 1: samples meet in 'mean'" in said(ranks, "meets")


@pytest.mark.conformance
def test_loaders_that_were_given_are_not_drawn_from(ranks: Ranks) -> None:
    plain, expected = ranks[0]["plain loader"]["user"], ranks[0]["wide given"]["user"]
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
    ranks: Ranks, job: str, why: str
) -> None:
    assert ranks[0][job]["shape"] == (1, 0)
    [line] = [text for text in ranks[0][job]["said"] if "form one chain" in text]
    assert why in line
    assert len(ranks[0][job]["user"]["losses"]) == 6


@pytest.mark.conformance
def test_cut_points_are_for_a_chain_of_all_devices(ranks: Ranks) -> None:
    assert ranks[0]["cut points"]["shape"] == (1, 0)
    assert "Chosen" not in said(ranks, "cut points")


@pytest.mark.conformance
def test_a_run_that_does_not_train_comes_before_one_that_does(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        found, expected = rank["predicts first"], rank["tiny"]
        assert found["shape"] == (2, number)
        assert found["user"]["losses"] == expected["user"]["losses"]
    assert "this run does not train" in said(ranks, "predicts first")
    assert "Chosen for 2 devices: 2 replicas" in said(ranks, "predicts first")


def test_what_is_prepared_on_rank_0_alone_is_for_one_replica(ranks: Ranks) -> None:
    """The tiny network would get two."""
    assert ranks[0]["prepared"]["shape"] == (1, 0)
    assert len(ranks[0]["prepared"]["user"]["losses"]) == 6
    told = "set Prepared.made, Prepared.train on rank 0 alone"
    assert told in said(ranks, "prepared")
    assert "so there is one" in said(ranks, "prepared")


@pytest.mark.conformance
def test_what_is_prepared_on_rank_0_alone_and_two_replicas_fail_as_under_ddp(ranks: Ranks) -> None:
    assert all("no attribute 'train'" in rank["prepared twice"]["error"] for rank in ranks)
    assert "on rank 0 alone" in said(ranks, "prepared twice")


def test_a_rank_that_fails_before_sizes_are_known_ends_the_run_everywhere(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["fails"]["error"] == "this error is on purpose"
        assert_the_same(rank["after a failure"]["user"], rank["tiny"]["user"])


@pytest.mark.conformance
@pytest.mark.parametrize("job", ["asks before", "in setup", "monitored"])
def test_the_number_of_replicas_that_was_told_before_sizes_were_chosen_stays_true(
    ranks: Ranks, job: str
) -> None:
    """The tiny network would get two; a process is told that it is in a chain of all."""
    assert [rank["asks before"]["before"] for rank in ranks] == [(1, 0), (1, 1)]
    assert ranks[0][job]["shape"] == (1, 0)
    assert "trainer.world_size was asked before" in said(ranks, job)
