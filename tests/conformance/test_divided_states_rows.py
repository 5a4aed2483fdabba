"""Rows about optimizers and checkpoints, where the replicas of a stage divide optimizer states."""

from typing import Any, ClassVar

import pytest
from suite import TWO_OF_TWO, Row
from test_conformance import TwoDevices, _Hybrid

from lightning_hybrid import Equal

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0), pytest.mark.conformance]


ROWS = (
    *("AddsGroups", "ChangesSettings", "ClipsByHand", "ClipsInItsStep", "CountsBeforeItsClosure"),
    *("EncodesWithAMask", "Evaluates", "FitsTwice", "GoesOnAfterFit", "HasStepHooks"),
    *("LimitsBatches", "LooksAhead", "MakesAnOptimizerAnew", "PacksWhatIsPadded"),
    *("ResumesOptimizers", "SavesAfterFit", "SavesCheckpoints", "ScalesGradients"),
    *("StepsTwiceInAStep", "TiesAcrossStages", "TrainsAdversaries", "TrainsAtTestTime"),
    *("TruncatesThroughTime", "UnfreezesBackbone"),
)


class _Divided(_Hybrid):
    @classmethod
    def make_strategy(cls, row: type[Row]) -> Any:
        defaults = {
            "data_parallel_size": cls.replicas,
            "pipeline_parallel_size": cls.stages,
            "num_microbatches": row.microbatches,
            "plan": row.cuts.get(cls.stages),
            "replicas": Equal(shard_states=True),
        }
        return cls.strategy(**{**defaults, **row.arguments})

    @classmethod
    def rows(cls) -> list[type[Row]]:
        return [r for r in cls.catalogue() if TWO_OF_TWO in r.shapes and r.__name__ in ROWS]


class TestReplicasOfTwoStages(_Divided):
    replicas: ClassVar = 2
    stages: ClassVar = 2
    reference = TwoDevices


class TestReplicas(_Divided):
    replicas: ClassVar = 2
    stages: ClassVar = 1
    knows_refusals = False
    reference = TwoDevices
