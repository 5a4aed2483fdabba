"""The precision of the driver's call is that of the stages on other ranks."""

import torch

from lightning_hybrid.comm.tensor_specs import CallPrecision

CPU = torch.device("cpu")


def test_what_is_in_force_on_one_rank_can_be_applied_on_another() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            precision = CallPrecision.current(CPU)
    finally:
        torch.set_default_dtype(before)
    with precision.applied():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.get_default_dtype() == torch.float64
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == before
