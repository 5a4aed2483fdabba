"""The rows of two stages over wires with NCCL's rules: what GPUs would refuse or wait for."""

import pytest
from nccl_rules import StrictGroup, install
from test_conformance import OneDevice, _Hybrid

from lightning_hybrid import HybridGabraStrategy

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(0), pytest.mark.conformance]


class _OverStrictWires(HybridGabraStrategy):
    def setup_distributed(self) -> None:
        install()
        super().setup_distributed()
        assert StrictGroup.made


class TestTwoStagesOverStrictWires(_Hybrid):
    """Groups and links of real processes, which take what NCCL takes."""

    stages = 2
    reference = OneDevice
    strategy = _OverStrictWires
