"""The rows under schedules that begin with later batches early: right, or refused by name."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from comparison import differences
from suite import Conformance, Record, Row, assert_computed_apart, assert_no_error
from test_conformance import OneDevice

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.errors import NetworkError, PlanError

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0), pytest.mark.conformance]
Records = Callable[[type[Conformance], type[Row]], list[Record]]


class _Streamed(Conformance):
    """Two stages, and those rows of the fast tier that are about Lightning and steps.

    Rows about a schedule or a plan of their own have said what they run under. A value that the
    network takes from Python is refused when it has changed, which is after the first step.
    """

    stages: ClassVar = 2
    refusals = (NetworkError, PlanError)
    also_refused = "begins with later batches"
    schedule: ClassVar[str]
    files: ClassVar[tuple[str, ...]]

    @classmethod
    def make_strategy(cls, row: type[Row]) -> HybridGabraStrategy:
        defaults = {
            "pipeline_parallel_size": cls.stages,
            "num_microbatches": row.microbatches,
            "allocation": row.cuts.get(cls.stages),
            "schedule": cls.schedule,
        }
        return HybridGabraStrategy(**{**defaults, **row.arguments})

    @classmethod
    def rows(cls) -> list[type[Row]]:
        found = [r for r in super().rows() if r.fast and r.__module__ in cls.files]
        return [row for row in found if not {"plan", "schedule"} & {*row.arguments}]

    def test_row(self, row: type[Row], records: Records) -> None:
        if row.needs:
            pytest.importorskip(row.needs)
        ranks = records(type(self), row)
        if any(self.also_refused in record["error"] for record in ranks):
            assert all(record["error"] for record in ranks), "a rank knows nothing of the refusal"
            said = [record.get("refusal", "") for record in ranks]
            assert any(self.also_refused in text for text in said), ranks[0]["error"]
            pytest.skip(f"refused by name: {next(filter(None, said))[:200]}")
        self.compare(row, records)

    def compare(self, row: type[Row], records: Records) -> None:
        super().test_row(row, records)


class OneDeviceInWindows(OneDevice):
    options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}


class Test1f1bInWindows(_Streamed):
    """The accumulation of one device. Without a row that counts on a step for each batch."""

    schedule = "1f1b"
    files = (
        "rows_callbacks",
        "rows_escapes",
        "rows_first_calls",
        "rows_lightning_state",
        "rows_loggers",
        "rows_optimizers",
        "rows_python_state",
        "rows_steps",
        "rows_trainer",
        "rows_user_code",
    )
    options = OneDeviceInWindows.options
    reference = OneDeviceInWindows

    @classmethod
    def rows(cls) -> list[type[Row]]:
        return [row for row in super().rows() if row.__name__ != "LogsPerformance"]

    def compare(self, row: type[Row], records: Records) -> None:
        if records(OneDeviceInWindows, row)[0]["error"]:
            pytest.skip("does not accumulate on one device either")
        super().compare(row, records)


class TestFdg(_Streamed):
    """Rows about Lightning: another model is trained, by the same calls, hooks and names."""

    schedule = "fdg"
    reference = OneDevice
    files = ("rows_callbacks", "rows_loggers", "rows_trainer")

    def compare(self, row: type[Row], records: Records) -> None:
        ranks, [expected] = records(type(self), row), records(OneDevice, row)
        if row.refused or (row.equal_or_refused and ranks[0]["error"]):
            super().compare(row, records)
            return
        assert_no_error(ranks)
        assert_computed_apart(ranks, row, self.stages)
        assert len(ranks[0]["seen"]) == len(expected["seen"])
        for record in ranks:
            found = [[[*logged], *counts] for _, logged, *counts in record["metrics"]]
            wanted = [[[*logged], *counts] for _, logged, *counts in expected["metrics"]]
            assert not list(differences(found, wanted, 0.0))
            assert record["weights"].keys() == expected["weights"].keys()
