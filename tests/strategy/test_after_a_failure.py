"""A script that catches an error goes on as if there had been no run."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.comm.connections import GroupHandle
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.errors import HybridError
from lightning_hybrid.process import Phase, World

MINUTE = timedelta(minutes=1)
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on unused devices


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def world_of(rank: int) -> World:
    """Two stages, of which this process is one, without groups."""
    everyone: Any = SimpleNamespace(store=dist.HashStore(), world=None)
    everyone.coordinates = Coordinates(rank, 1, 2)
    mesh = SimpleNamespace(**vars(everyone), say_goodbye=lambda _: None, survivors=None)
    joined: Any = SimpleNamespace(cluster=None, mesh=mesh)
    world = World(everyone, MINUTE)
    world.take_coordinates(joined)
    return world


def failed(error: BaseException, rank: int) -> tuple[HybridGabraStrategy, Failure | None]:
    """The strategy of a rank, after a run that has failed there; and what it was told first."""
    strategy = HybridGabraStrategy(pipeline_parallel_size=2)
    Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    strategy.connect(Net())
    strategy._ranks.world = world_of(rank)
    strategy._ranks.world.phase = Phase.RUNNING
    first = strategy.fail(error)
    strategy.on_exception(error)
    strategy.teardown()
    return strategy, first


@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_error_is_not_taken_for_the_first(rank: int) -> None:
    strategy, first = failed(ValueError("first"), rank)
    assert first is None
    assert strategy.fail(KeyError("second")) is None


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.SERVING])
def test_who_fails_in_a_run_begins_no_meeting(phase: Phase) -> None:
    # a group with a collective that nobody joins would not let its process end
    world = world_of(0)
    world.phase = phase
    assert world.fail(ValueError("on purpose"), "rank 0") is None


def test_a_rank_that_has_no_group_of_all_tells_the_others() -> None:
    everyone: Any = SimpleNamespace(coordinates=Coordinates(1, 1, 2), store=dist.HashStore())
    everyone.world = GroupHandle()
    assert World(everyone, MINUTE).fail(ValueError("on purpose"), "rank 1") is None
    told = World(everyone, MINUTE).fail(KeyError("later"), "rank 0")
    assert told is not None
    assert str(told.exception()) == "on purpose"


def test_a_rank_that_has_no_place_yet_says_so() -> None:
    everyone: Any = SimpleNamespace(coordinates=Coordinates(1, 1, 2), store=dist.HashStore())
    world = World(everyone, MINUTE)
    world.stop_watching()
    assert world.coordinates == everyone.coordinates
    with pytest.raises(HybridError, match="chosen when the run is set up"):
        _ = world.mesh


def test_weights_can_be_saved() -> None:
    strategy, _ = failed(ValueError("first"), 0)
    assert strategy.lightning_module_state_dict().keys() == {"layer.weight", "layer.bias"}
    strategy.barrier()
    assert strategy.broadcast("alone") == "alone"
