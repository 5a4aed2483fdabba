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


@pytest.mark.parametrize("lost", ["host", "launch"])
def test_a_run_goes_on_with_fewer_processes_and_the_same_numbers(lost: str) -> None:
    name, run = next(runs([lost], seed=0))
    assert (len(run.kills), run.wrong) == (1, []), name
