"""What loggers get of a plan."""

from types import SimpleNamespace
from typing import Any

from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.run.performance_log import PlanLog

PLAN = Plan(replicas=1, stages=3, microbatches=1, schedule="fdg", cuts=("1", "2"))


def logged(names: tuple[str, ...] | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    plans: dict[str, Plan] = {}
    trainer: Any = SimpleNamespace(loggers=[SimpleNamespace(log_hyperparams=found.append)])
    log = PlanLog(trainer, plans, names, {"delayed_weights": "stash", "gradient_shrinking": 0.5})
    log.batch_starts(None)
    assert found == []  # nothing is cut yet
    plans["net"] = PLAN
    for _ in range(2):
        log.batch_starts(None)
    log.end()
    return found


def test_the_delays_are_logged_once_with_what_the_backward_computes_with() -> None:
    assert logged(("schedule", "delays")) == [
        {
            "hybrid/schedule": "fdg",
            "hybrid/delays": "3, 1, 0",
            "hybrid/delayed_weights": "stash",
            "hybrid/gradient_shrinking": 0.5,
        }
    ]


def test_the_whole_plan_is_logged_where_it_is_asked_for() -> None:
    [values] = logged(None)
    assert values["hybrid/cuts"] == "1, 2"
    assert values["hybrid/delayed_weights"] == "stash"
