"""Records of options: what contradicts cannot be made, and each is shown as it is written."""

from collections.abc import Callable
from typing import Any, get_args

import pytest

from lightning_hybrid import (
    Asynchronous,
    BySpeed,
    Delayed,
    Equal,
    HybridGabraFabricStrategy,
    HybridGabraStrategy,
    Search,
    Sharded,
)
from lightning_hybrid.config import ScheduleName
from lightning_hybrid.errors import PlanError
from lightning_hybrid.options import DelayedName
from lightning_hybrid.schedules import SCHEDULES, STREAMED

RECORDS: list[Any] = [
    Delayed("fdg"),
    Delayed("fdg", weights="current", shrink=0.5),
    Search(),
    Search(method="exact", capacity=(1.0, 2.0)),
    Equal(shard_states=True),
    BySpeed(on_loss="continue"),
    Asynchronous(staleness=4),
    Sharded(asynchronous=True),
]


def test_type_checkers_know_every_schedule_as_a_name_or_as_a_delayed_one() -> None:
    delayed = {name for name, schedule in STREAMED.items() if schedule.delayed}
    assert {*get_args(DelayedName)} == delayed
    assert {*get_args(ScheduleName)} == {"auto", *SCHEDULES} - delayed


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_what_is_shown_makes_the_record_again(record: Any) -> None:
    assert eval(repr(record)) == record


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Delayed("gpipe"), "Delayed: name='gpipe' is none of 'pipedream', 'ddg'"),  # type: ignore[arg-type]
        (lambda: Delayed("fdg", weights="old"), "weights='old' is none of 'stash'"),  # type: ignore[arg-type]
        (lambda: Delayed("fdg", shrink=0.0), "shrink above 0 and at most 1"),
        (lambda: Delayed("ddg", shrink=0.5), "shrink is part of 'fdg', not of 'ddg'"),
        (lambda: Search(method="best"), "Search: method='best' is none of 'gabra'"),  # type: ignore[arg-type]
        (lambda: Search(objective="cost"), "objective='cost' is none of 'step'"),  # type: ignore[arg-type]
        (lambda: Search(replan="epoch", contiguous=False), "moves the cuts of contiguous stages"),
        (lambda: BySpeed(on_loss="restart"), "on_loss='restart' is none of 'end', 'continue'"),  # type: ignore[arg-type]
        (lambda: BySpeed(on_loss="continue", replan="epoch"), "Use on_loss='continue' alone"),
        (lambda: BySpeed(on_loss="continue", shard_states=True), "Use on_loss='continue' alone"),
        (lambda: Asynchronous(staleness=-1), "staleness is a whole number"),
        (lambda: Asynchronous(staleness=True), "staleness is a whole number"),
    ],
)
def test_a_value_that_is_none_is_refused_where_the_record_is_made(
    make: Callable[[], Any], words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize("strategy", [HybridGabraStrategy, HybridGabraFabricStrategy])
def test_a_name_that_never_was_is_answered_by_python(strategy: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'stages'"):
        strategy(stages=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"search": {"method": "gabra"}}, "search={'method': 'gabra'} is none of Search(...)"),
        ({"replicas": "asgd"}, "'asgd' is none of Equal(...), BySpeed(...), Asynchronous(...)"),
        ({"checkpoint": "sharded"}, "checkpoint='sharded' is none of 'full', Sharded(...)"),
    ],
)
def test_what_is_no_record_is_refused_by_the_records_that_there_are(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        HybridGabraStrategy(**arguments)
    assert words in str(caught.value)
