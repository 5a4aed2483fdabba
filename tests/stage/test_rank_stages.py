"""What the passes of a rank have in common."""

import pytest
from pipelines import Pipeline, chain, slices

from lightning_hybrid.comm.travelling_errors import Failure


def test_the_first_failure_is_the_one_that_is_told() -> None:
    engine = Pipeline(chain(2), (1, 0)).engines[1]
    engine.fail(ValueError("first"), 0)
    engine.fail(ValueError("second"), 0)
    assert isinstance(engine.failure, Failure)
    with pytest.raises(ValueError, match="first"):
        raise engine.failure.exception()


def test_gradients_of_the_first_stage_of_a_rank_come_last() -> None:
    network = chain(4)
    engine = Pipeline(network, (1, 2, 1, 0)).engines[1]
    assert [own.number for own in engine.owned] == [0, 2]
    later = list(network[2].parameters())
    assert len(engine.done_before) == len(later)
    assert all(a is b for a, b in zip(engine.done_before, later))


def test_nothing_waits_where_no_call_runs_ahead() -> None:
    pipeline, parts = Pipeline(chain(2), (1, 0)), slices()
    call = pipeline.open(parts)[0]
    assert pipeline.engines[1].untaken(call) == 0
