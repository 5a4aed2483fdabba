"""What loggers get of a plan."""

from types import SimpleNamespace
from typing import Any

from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.run.performance_log import PlanLog

PLAN = Plan(replicas=1, stages=3, microbatches=1, schedule="fdg", cuts=("1", "2"))


def test_a_plan_is_logged_once_with_what_the_backward_computes_with() -> None:
    found: list[dict[str, Any]] = []
    plans: dict[str, Plan] = {}
    trainer: Any = SimpleNamespace(loggers=[SimpleNamespace(log_hyperparams=found.append)])
    log = PlanLog(trainer, plans, {"delayed_weights": "stash", "gradient_shrinking": 0.5})
    log.batch_starts(None)
    assert found == []  # nothing is cut yet
    plans["net"] = PLAN
    for _ in range(2):
        log.batch_starts(None)
    log.end()
    [values] = found
    assert (
        values.items()
        >= {
            "hybrid/schedule": "fdg",
            "hybrid/delays": "3, 1, 0",
            "hybrid/cuts": "1, 2",
            "hybrid/delayed_weights": "stash",
            "hybrid/gradient_shrinking": 0.5,
        }.items()
    )
