"""What loggers get of a plan."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_hybrid.comm import Coordinates
from lightning_hybrid.parts.performance_log import PerformanceLog
from lightning_hybrid.planning.plan import Plan

PLAN = Plan(replicas=1, stages=3, microbatches=1, schedule="fdg", cuts=("1", "2"))
DRIVER: Any = None  # nobody asks it, without a stopwatch


def test_a_plan_is_logged_once_with_its_delays() -> None:
    found: list[dict[str, Any]] = []
    plans: dict[str, Plan] = {}
    loggers = [SimpleNamespace(log_hyperparams=found.append)]
    trainer = SimpleNamespace(loggers=loggers, global_step=0, log_every_n_steps=50)
    world = SimpleNamespace(coordinates=Coordinates(0, 1, 3))
    run: Any = SimpleNamespace(stopwatch=None, trainer=trainer, plans=plans, world=world)
    log = PerformanceLog(run)
    log.begin(DRIVER)
    log.batch_starts(None)
    assert found == []  # nothing is cut yet
    plans["net"] = PLAN
    for _ in range(2):
        log.batch_starts(None)
    log.training_ends()
    [values] = found
    assert (
        values.items()
        >= {
            "hybrid/schedule": "fdg",
            "hybrid/delays": "3, 1, 0",
            "hybrid/cuts": "1, 2",
        }.items()
    )


def test_tensorboard_gets_a_plan_as_a_text_and_no_value_of_its_own(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version=0)
    trainer = SimpleNamespace(loggers=[logger], global_step=0, log_every_n_steps=50)
    world = SimpleNamespace(coordinates=Coordinates(0, 1, 3))
    run: Any = SimpleNamespace(stopwatch=None, trainer=trainer, plans={"net": PLAN}, world=world)
    log = PerformanceLog(run)
    log.begin(DRIVER)
    log.batch_starts(None)
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    tags = events.Tags()
    assert tags["scalars"] == []  # an hp_metric of -1 would stand beside the user's
    assert "hybrid/plan/text_summary" in tags["tensors"]
    assert "hybrid/cuts: 1, 2" in Path(logger.log_dir, "hparams.yaml").read_text()


def test_the_work_before_the_first_step_is_logged_by_parts_after_it() -> None:
    found: list[dict[str, Any]] = []
    logger = SimpleNamespace(
        log_metrics=lambda values, step: found.append({"step": step, **values})
    )
    trainer = SimpleNamespace(loggers=[logger], global_step=0, log_every_n_steps=50)
    world = SimpleNamespace(coordinates=Coordinates(0, 1, 3))
    progress = SimpleNamespace(
        seconds={"capturing 'net'": 2.5, "profiling and planning 'net'": 4.0}
    )
    run: Any = SimpleNamespace(
        stopwatch=None, trainer=trainer, plans={}, world=world, progress=progress
    )
    log = PerformanceLog(run)
    log.begin(DRIVER)
    for trainer.global_step in range(3):
        log.batch_starts(None)
    capturing, planning = "hybrid/start/capturing_s", "hybrid/start/profiling_and_planning_s"
    assert found == [{"step": 0, capturing: 2.5, planning: 4.0}]
