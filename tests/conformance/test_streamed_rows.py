"""The rows under schedules that begin with later batches early: right, or refused by name."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from suite import Conformance, Record, Row
from test_conformance import OneDevice
from torch import Tensor, nn

from lightning_hybrid import Delayed, HybridGabraStrategy
from lightning_hybrid.errors import NetworkError, PlanError

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0), pytest.mark.conformance]
Records = Callable[[type[Conformance], type[Row]], list[Record]]


class _Streamed(Conformance):
    """Two stages, and those rows of the fast tier that are about Lightning and steps.

    Rows about a schedule or a plan of their own have said what they run under. A value that the
    network takes from Python is refused when it has changed, which is after the first step.

    Attributes:
        schedule: the argument.
        files: of the rows.
        also: names of rows of these files that run here, although they are slow elsewhere.
    """

    stages: ClassVar = 2
    refusals = (NetworkError, PlanError)
    also_refused = "begins with later batches"
    loader_processes = 1
    schedule: ClassVar[str | Delayed]
    files: ClassVar[tuple[str, ...]]
    also: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def make_strategy(cls, row: type[Row]) -> HybridGabraStrategy:
        defaults = {
            "pipeline_parallel_size": cls.stages,
            "num_microbatches": row.microbatches,
            "plan": row.cuts.get(cls.stages),
            "schedule": cls.schedule,
        }
        return HybridGabraStrategy(**{**defaults, **row.arguments})

    @classmethod
    def rows(cls) -> list[type[Row]]:
        here = [row for row in super().rows() if row.__module__ in cls.files]
        found = [row for row in here if row.sampled or row.__name__ in cls.also]
        return [row for row in found if "schedule" not in row.arguments]

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
    loader_processes = 1
    options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}


class Test1f1bInWindows(_Streamed):
    """The accumulation of one device. Without a row that counts on a step for each batch."""

    schedule = "1f1b_stream"
    files = (
        "rows_callbacks",
        "rows_escapes",
        "rows_first_calls",
        "rows_lightning_state",
        "rows_loggers",
        "rows_optimizers",
        "rows_python_state",
        "rows_samples",
        "rows_steps",
        "rows_trainer",
        "rows_user_code",
    )
    # a run that ends early, fewer batches, and learning rates that change from step to step
    also = (
        "LimitsBatches",
        "StopsItself",
        "SkipsTheRestOfTheEpoch",
        "SchedulesByStep",
        "SchedulesOneCycle",
        "SchedulesOnPlateau",
        "SchedulesOnPlateauByStep",
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


class _Delayed(SingleDeviceStrategy):
    """The formula of `fdg` on one device: each stage but the last has older weights.

    From its forward on until its backward; the gradient is applied to the weights of now. The
    weights of a stage are those before the batch that lies as many batches back as the stage looks
    ahead, or the first one since the start of the epoch, a validation or a checkpoint.

    Args:
        cuts: names of the first modules of the later stages.
    """

    def __init__(self, cuts: list[str]) -> None:
        super().__init__("cpu")
        self._cuts = cuts
        self._before: list[dict[nn.Parameter, Tensor]] = []  # the weights, as each batch began
        self._now: dict[nn.Parameter, Tensor] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._before = []

    def on_validation_start(self) -> None:
        self._before = []

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._before = []
        return super().lightning_module_state_dict()

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        ages = self._ages()
        self._now = {parameter: parameter.detach().clone() for parameter in ages}
        self._before.append(self._now)
        for parameter, age in ages.items():
            old = self._before[max(0, len(self._before) - 1 - age)]
            parameter.data = old.get(parameter, self._now[parameter]).clone()
        return super().training_step(*arguments, **named)

    def backward(self, *arguments: Any, **named: Any) -> Tensor:
        loss = super().backward(*arguments, **named)
        for parameter, now in self._now.items():
            parameter.data = now.clone()
        return loss

    def _ages(self) -> dict[nn.Parameter, int]:
        """By how many steps each parameter of all stages but the last is too old."""
        stages, stage, found = len(self._cuts) + 1, 1, {}
        for name, parameter in self.lightning_module.named_parameters():
            if stage < stages and name.startswith(f"{self._cuts[stage - 1]}."):
                stage += 1
            if stage < stages:
                found[parameter] = 2 * (stages - stage) - 1
        return found


class DelayedOnOneDevice(OneDevice):
    loader_processes = 1
    of: ClassVar = 2

    @classmethod
    def make_strategy(cls, row: type[Row]) -> Any:
        return _Delayed(row.cuts[cls.of])


class DelayedByThreeStages(DelayedOnOneDevice):
    of = 3


class TestFdg(_Streamed):
    """Rows about Lightning: values, weights, metrics and results are those of the formula."""

    schedule = Delayed("fdg")
    reference: ClassVar[Any] = DelayedOnOneDevice
    files = ("rows_callbacks", "rows_loggers", "rows_samples", "rows_trainer")


class TestFdgOfThreeStages(TestFdg):
    stages = 3
    reference = DelayedByThreeStages


class Test1f1bInWindowsOfThreeStages(Test1f1bInWindows):
    stages = 3
