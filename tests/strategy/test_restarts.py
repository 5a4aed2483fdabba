"""See `benchmarks/restarts.py`, which kills as many as it is told."""

from itertools import islice

import pytest

from benchmarks.restarts import runs

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.conformance,
    pytest.mark.timeout(3600),
]


def test_a_run_that_torchrun_starts_again_has_the_numbers_of_an_undisturbed_one() -> None:
    for name, run in islice(runs(["restarted"], seed=0), 2):
        assert (len(run.kills), run.wrong) == (3, []), name


def test_a_run_goes_on_with_fewer_processes_and_the_same_numbers() -> None:
    name, run = next(runs(["launch"], seed=0))
    assert (len(run.kills), run.wrong) == (1, []), name


def test_either_host_can_be_lost_where_torchrun_meets_elsewhere() -> None:
    lost = set()
    for name, run in islice(runs(["host"], seed=1), 2):
        assert run.wrong == [], name
        lost |= {what for what, _ in run.kills}
    assert lost == {"host of rank 0 of 2", "host of rank 1 of 2"}
