"""What a driver does so that the Trainer goes on when another replica is lost."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_hybrid import BySpeed
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.config import Config
from lightning_hybrid.errors import PlanError
from lightning_hybrid.parts.lost_replicas import LostReplicas, survives_losses

# Lightning's advice on unused devices and loggers
pytestmark = pytest.mark.filterwarnings("ignore")


class Left:
    """Survivors that note the end."""

    told_to_end, over = False, False

    def on_loss(self, lost: Collection[int]) -> None:
        raise AssertionError

    def end(self) -> None:
        self.over = True


def trainer() -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def test_a_trainer_begins_its_batches_alone_until_the_run_is_over() -> None:
    one, left, lost = trainer(), Left(), list[Collection[int]]()
    run: Any = SimpleNamespace(trainer=one)
    survivors, driver = (left,) * 2  # type: Any, Any
    part = LostReplicas(run, survivors, lost.append)
    before = set(vars(one.fit_loop.epoch_loop))
    part.begin(driver)
    assert vars(one.fit_loop.epoch_loop).keys() - before == {"_broadcast_sigterm_tensor"}
    left.on_loss([2])
    assert lost == [[2]]
    part.last_batch_is_over()
    assert left.over
    part.close()
    assert set(vars(one.fit_loop.epoch_loop)) == before


@pytest.mark.parametrize("of_another", [False, True])
def test_all_replicas_end_after_the_averages_in_which_one_was_told_to(of_another: bool) -> None:
    one, left = trainer(), Left()
    run: Any = SimpleNamespace(trainer=one)
    survivors: Any = left
    part = LostReplicas(run, survivors, print)
    part.backward_is_over()
    assert not left.told_to_end
    left.told_to_end = of_another  # as the averages say
    part.gradients_are_averaged()
    assert one.received_sigterm is of_another
    part.backward_is_over()
    assert left.told_to_end is of_another


@pytest.mark.parametrize(
    ("scripted", "replicas", "text"),
    [(True, 1, "needs another replica"), (False, 2, "needs processes that the script has started")],
)
def test_what_a_lost_replica_would_end_is_refused(scripted: bool, replicas: int, text: str) -> None:
    one = trainer()
    one.strategy.connect(BoringModel())
    run: Any = SimpleNamespace(
        config=Config(replicas=BySpeed(on_loss="continue")),
        fitting=True,
        trainer=one,
        world=SimpleNamespace(coordinates=Coordinates(0, replicas, 1)),
    )
    with pytest.raises(PlanError, match=rf"on_loss='continue' {text}.*or use on_loss='end'"):
        survives_losses(run, scripted=scripted)
    run.fitting = False
    assert not survives_losses(run, scripted=scripted)
