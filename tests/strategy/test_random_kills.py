"""See `random_kills.py`, which kills as many as it is told."""

import pytest
from random_kills import LIMIT_S, kill_many

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.conformance,
    pytest.mark.timeout(3600),
]


def test_no_rank_outlives_a_killed_one_and_only_whole_checkpoints_are_left() -> None:
    for seen in kill_many(10, seed=0):
        assert not seen["wrong"], seen
        assert (seen["outlived_s"] or 0) < LIMIT_S
