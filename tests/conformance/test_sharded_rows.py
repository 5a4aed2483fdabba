"""The rows that save, and go on from what they have saved, with a file for each rank."""

from typing import Any, ClassVar

import pytest
from suite import Row
from test_conformance import OneDevice, TwoDevices, _Hybrid

from lightning_hybrid import Sharded

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0), pytest.mark.conformance]
ROWS = (
    "AveragesWeights",
    "AveragesWeightsExponentially",
    "AveragesWeightsMadeInConfigureModel",
    "GoesOnAfterFit",
    "LooksAhead",
    "ResumesOptimizers",
    "SavesAfterAnException",
    "SavesAfterFit",
    "SavesCheckpoints",
    "SavesOnException",
    "SavesOnlyOnException",
)


class _Sharded(_Hybrid):
    kind: ClassVar[Sharded]

    @classmethod
    def make_strategy(cls, row: type[Row]) -> Any:
        strategy = super().make_strategy(row)
        return type(strategy)(
            data_parallel_size=cls.replicas,
            pipeline_parallel_size=cls.stages,
            num_microbatches=row.microbatches,
            plan=row.cuts[cls.stages],
            checkpoint=cls.kind,
        )

    @classmethod
    def rows(cls) -> list[type[Row]]:
        return [row for row in super().rows() if row.__name__ in ROWS]


class TestTwoStages(_Sharded):
    stages = 2
    reference = OneDevice
    kind = Sharded()


class TestReplicasOfTwoStagesBesideTraining(_Sharded):
    """After an exception the other ranks do not wait for what is written: no such rows."""

    replicas: ClassVar = 2
    stages: ClassVar = 2
    reference = TwoDevices
    kind = Sharded(asynchronous=True)

    @classmethod
    def rows(cls) -> list[type[Row]]:
        return [row for row in super().rows() if "Exception" not in row.__name__]
