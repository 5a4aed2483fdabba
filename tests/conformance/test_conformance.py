"""The rows, under `hybrid_gabra` in several shapes, and under plain `ddp` as the control."""

from typing import ClassVar

import pytest
from suite import ONE_OF_THREE, ONE_OF_TWO, Conformance, Row, all_rows

from lightning_hybrid import HybridGabraStrategy

pytestmark = pytest.mark.distributed


class OneDevice(Conformance):
    """Plain Lightning in one process."""

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:
        return "auto"


class TwoDevices(Conformance):
    """Plain `ddp` over two."""

    replicas = 2

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:
        return "ddp"


class TestControl(Conformance):
    """`ddp` on one device: the rows ask for no more than Lightning gives."""

    reference = OneDevice

    @classmethod
    def make_strategy(cls, row: type[Row]) -> str:
        return "ddp"

    @classmethod
    def rows(cls) -> list[type[Row]]:
        of_one_device = {ONE_OF_TWO, ONE_OF_THREE}
        return [row for row in all_rows() if row.control and of_one_device & {*row.shapes}]

    @classmethod
    def is_fast(cls, row: type[Row]) -> bool:
        return False


class _Hybrid(Conformance):
    @classmethod
    def make_strategy(cls, row: type[Row]) -> HybridGabraStrategy:
        defaults = {"num_microbatches": row.microbatches, "allocation": row.cuts.get(cls.stages)}
        return HybridGabraStrategy(cls.replicas, cls.stages, **{**defaults, **row.arguments})


class TestTwoStages(_Hybrid):
    stages = 2
    reference = OneDevice


class TestThreeStages(_Hybrid):
    stages = 3
    reference = OneDevice


class TestReplicasOfTwoStages(_Hybrid):
    replicas: ClassVar = 2
    stages: ClassVar = 2
    reference = TwoDevices
