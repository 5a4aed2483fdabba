"""The recorded trace of a run shows what overlaps."""

from pathlib import Path

import pytest

from benchmarks.allreduce_overlap import MICRO_BATCHES, last_step, run

pytestmark = pytest.mark.distributed


@pytest.mark.conformance
def test_gradients_leave_while_the_last_micro_batch_goes_backward(tmp_path: Path) -> None:
    ranks = run(tmp_path, side=24)
    assert [*ranks] == [0, 1, 2, 3]
    for rank in (0, 2):  # the drivers, whose stage has several buckets
        backwards, reduces = last_step(ranks[rank])
        assert len({backward["name"] for backward in backwards}) == MICRO_BATCHES
        last = backwards[-1]
        assert len(reduces) > 1
        # (no gradient is final before the last micro-batch)
        assert all(last["ts"] < reduce["ts"] for reduce in reduces)
        assert reduces[0]["ts"] < last["ts"] + last["dur"]
