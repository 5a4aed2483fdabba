"""What the passes of a rank have in common."""

import pytest
import torch
from pipelines import Pipeline, chain, slices
from torch import nn

from lightning_hybrid.comm.protocol import Placement
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.stage.rank_stages import borrowed_parameters


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


@pytest.mark.parametrize(
    ("names", "devices", "borrowed"),
    [
        # a chain: the earliest stage owns
        (("ab", "ac", "ad"), (1, 2, 0), ["a", "", "a"]),
        # both uses on one rank: nothing to borrow
        (("ab", "c", "ad", "e"), (1, 0, 1, 0), ["", ""]),
        # the driver borrows, though its stage comes first
        (("ab", "ac", "d"), (0, 1, 0), ["a", ""]),
        (("a", "b", "c", "a"), (0, 1, 2, 0), ["", "", ""]),
        (("a", "a", "a", "b"), (0, 2, 1, 0), ["a", "a", ""]),
    ],
)
def test_the_earliest_worker_owns_what_several_ranks_use(
    names: tuple[str, ...], devices: tuple[int, ...], borrowed: list[str]
) -> None:
    network = nn.ParameterDict({name: torch.zeros(1) for name in "abcde"})
    owned = tuple(frozenset(each) for each in names)
    found = borrowed_parameters(network, Placement(devices, owned, "gpipe"))
    assert found == [frozenset(each) for each in borrowed]
