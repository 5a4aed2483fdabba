"""The rows, under `hybrid_gabra` in several shapes, and under plain `ddp` as the control."""

from typing import Any, ClassVar

import pytest
from suite import ONE_OF_THREE, ONE_OF_TWO, Conformance, Row

from lightning_hybrid import HybridGabraStrategy, Plan, Search
from lightning_hybrid.errors import NetworkError, PlanError

# The first test of a class waits for all rows of the class; their session ends what hangs.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0)]


class OneDevice(Conformance):
    """Plain Lightning in one process."""

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:
        return "auto"


class TwoDevices(Conformance):
    """Plain `ddp` over two. (Networks that take turns leave parameters unused.)"""

    replicas = 2

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:
        return "ddp_find_unused_parameters_true"


class TestControl(Conformance):
    """`ddp` on one device: the rows ask for no more than Lightning gives."""

    reference = OneDevice

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:
        return "ddp_find_unused_parameters_true"

    @classmethod
    def rows(cls) -> list[type[Row]]:
        of_one_device = {ONE_OF_TWO, ONE_OF_THREE}
        return [row for row in cls.catalogue() if row.control and of_one_device & {*row.shapes}]


class _Hybrid(Conformance):
    refusals = (NetworkError, PlanError)
    knows_refusals = True
    strategy: ClassVar[type[HybridGabraStrategy]] = HybridGabraStrategy

    @classmethod
    def make_strategy(cls, row: type[Row]) -> HybridGabraStrategy:
        defaults = {
            "data_parallel_size": cls.replicas,
            "pipeline_parallel_size": cls.stages,
            "num_microbatches": row.microbatches,
            "plan": row.cuts.get(cls.stages),
        }
        return cls.strategy(**{**defaults, **row.arguments})


class TestTwoStages(_Hybrid):
    stages = 2
    reference = OneDevice

    @classmethod
    def is_fast(cls, row: type[Row]) -> bool:
        return row.fast


class OneDeviceOfPytorchLightning(OneDevice):
    package = "pytorch_lightning"


class TestTwoStagesOfPytorchLightning(_Hybrid):
    """The rows about classes of Lightning; networks and operators are the same in both packages."""

    stages = 2
    reference = OneDeviceOfPytorchLightning
    package = "pytorch_lightning"
    files = (
        "rows_callbacks",
        "rows_driver_state",
        "rows_lightning_state",
        "rows_loggers",
        "rows_steps",
        "rows_trainer",
    )

    @classmethod
    def rows(cls) -> list[type[Row]]:
        return [r for r in super().rows() if r.__module__ in cls.files and r.sampled]


class _OnlyAChain(HybridGabraStrategy):
    """Sizes are left open, and one chain is chosen, whatever it is predicted to take."""

    def _may_have(self, replicas: int, stages: int) -> bool:
        return replicas == 1 and super()._may_have(replicas, stages)


class TestTwoStagesThatWereChosen(Conformance):
    """Rows whose sizes are left open: a look at the network before a run leaves no trace in it.

    Without the one that asks for stages which there cannot be, the one whose hooks on all modules
    of the process write to a list of the user's (they hear of the look, too), and those that are
    refused, or work, for where they are cut: the cut follows measured speeds here.
    """

    stages: ClassVar = 2
    reference = OneDevice
    refusals = _Hybrid.refusals
    looks = 1
    cuts_freely = True

    @classmethod
    def make_strategy(cls, row: type[Row]) -> HybridGabraStrategy:
        return _OnlyAChain(**{"num_microbatches": row.microbatches, **row.arguments})

    @classmethod
    def rows(cls) -> list[type[Row]]:
        without = (
            "RefusedSingleLayer",
            "HooksAllModules",
            "RefusedTiedWeightsCompiled",
            # (up to the choice of sizes workers run the script too, and their ranks are no shards)
            "ShardsInSetup",
            # (these read the matrix, which all ranks have where the cut ties them)
            "TiesAcrossStagesOfConfigureModel",
            "FitsAgainInConfigureModel",
        )
        return [row for row in super().rows() if row.__name__ not in without]


class TestThreeStages(_Hybrid):
    stages = 3
    reference = OneDevice


class TestReplicasOfTwoStages(_Hybrid):
    replicas: ClassVar = 2
    stages: ClassVar = 2
    reference = TwoDevices


class _DriverAtBothEnds(HybridGabraStrategy):
    """Two devices per replica, of which the driver's has the first and the last of three stages."""

    row: type[Row]

    def _plan_network(self, run: Any, *arguments: Any) -> Plan:
        network, microbatches, *_ = arguments
        own = f"{network.name}." if network.name else ""
        return Plan(
            replicas=self.num_replicas,
            stages=3,
            microbatches=microbatches,
            schedule="gpipe",
            cuts=tuple(p.removeprefix(own) for p in self.row.cuts[3] if p.startswith(own)),
            devices=(0, 1, 0),
        )


class TestFreePlacement(Conformance):
    """Rows that have cuts for three stages.

    Without those that look for the names of two, those with a schedule of their own, which wants
    one stage a device, and those that become a chain of graphs, of which none begins where the plan
    says.
    """

    stages: ClassVar = 2
    reference = OneDevice
    refusals = _Hybrid.refusals
    without = (
        *("LogsPerformance", "MonitorsThroughputAndDevices"),
        *("DrawsInPython", "HasDistributions", "MeasuresInForward", "Prints", "TrainsBERT"),
        *("PrintsInTrainingAlone", "PrintsInTrainingWithoutASanityCheck"),
    )

    @classmethod
    def make_strategy(cls, row: type[Row]) -> HybridGabraStrategy:
        defaults = {
            "pipeline_parallel_size": cls.stages,
            "num_microbatches": row.microbatches,
            "search": Search(contiguous=False),
        }
        strategy = _DriverAtBothEnds(**{**defaults, **row.arguments})
        strategy.row = row
        return strategy

    @classmethod
    def rows(cls) -> list[type[Row]]:
        rows = [row for row in super().rows() if 3 in row.cuts and not row.refused]
        rows = [row for row in rows if "schedule" not in row.arguments]
        return [row for row in rows if row.__name__ not in cls.without]
