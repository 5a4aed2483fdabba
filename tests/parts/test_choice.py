"""Which parts a run has, and in which order their hooks are called."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_hybrid import Asynchronous, BySpeed, Delayed, Search
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.config import Config
from lightning_hybrid.driver.progress import StartProgress
from lightning_hybrid.parts import choice, parts_of
from lightning_hybrid.run.building import Building
from lightning_hybrid.run.framework import TrainerFramework
from lightning_hybrid.run.run import Run

# Lightning's advice on unused devices and loggers
pytestmark = pytest.mark.filterwarnings("ignore")
CONTINUE = BySpeed(on_loss="continue")


def run(rank: int, size: int, stages: int, survivors: Any = None, **options: Any) -> Run:
    here = Coordinates(rank, size, stages)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module := BoringModel())
    mesh = SimpleNamespace(coordinates=here, drivers=None, survivors=survivors)
    world: Any = SimpleNamespace(coordinates=here, mesh=mesh, cluster=None)
    return Run(
        config=Config(**options),
        framework=TrainerFramework(trainer),
        module=module,
        world=world,
        device=torch.device("cpu"),
        precision=trainer.precision_plugin,
        fitting=True,
        synchronised=False,
        building=Building(),
        stopwatch=None,
        shared=frozenset(),
        plans={},
        progress=StartProgress(None),
    )


@pytest.mark.parametrize(
    ("shape", "options", "names"),
    [
        ((0, 2, 2), {}, []),
        ((0, 2, 2), {"log_performance": True}, ["PerformanceLog"]),
        ((1, 2, 2), {"log_performance": True}, []),  # replica 0 logs
        ((0, 2, 1), {"replicas": Asynchronous()}, ["AsynchronousReplica"]),
        ((0, 2, 1), {"replicas": BySpeed()}, ["UnequalShares"]),
        ((0, 1, 2), {"replicas": BySpeed()}, []),
        (
            (0, 2, 1, "survivors"),
            {"replicas": CONTINUE, "log_performance": True},
            ["UnequalShares", "LostReplicas", "PerformanceLog"],
        ),
        ((0, 1, 2), {"schedule": Delayed("fdg")}, ["ComingBatches"]),
        ((0, 1, 2), {"schedule": Delayed("akintoye")}, ["PlainDescent", "ComingBatches"]),
        ((0, 1, 1), {"schedule": Delayed("akintoye")}, ["PlainDescent"]),
        (
            (0, 1, 2),
            {"search": Search(replan="epoch"), "log_performance": True},
            ["PerformanceLog", "Replanning"],
        ),
    ],
)
def test_a_run_has_the_parts_that_its_options_ask_for(
    shape: Any, options: dict[str, Any], names: list[str]
) -> None:
    assert [type(part).__name__ for part in parts_of(run(*shape, **options))] == names


def test_cuts_that_cannot_change_are_said_and_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(choice, "rank_zero_info", lines.append)
    assert parts_of(run(0, 2, 1, search=Search(replan="epoch"))) == []
    assert lines == ["replan='epoch' changes nothing in this run: there is one stage."]
