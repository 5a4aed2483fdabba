"""A worker computes with the precision of the driver's call, and afterwards with its own."""

import torch

from lightning_hybrid.comm.call_precision import CallPrecision


def test_inside_the_drivers_precision_is_that_of_this_process() -> None:
    before = CallPrecision.current(torch.device("cpu"))
    there = CallPrecision("cpu", torch.bfloat16, autocast=True, default_dtype=torch.float64)
    with there.applied():
        assert CallPrecision.current(torch.device("cpu")) == there
        assert torch.zeros(1).dtype is torch.float64
        product = torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)
        assert product.dtype is torch.bfloat16
    assert CallPrecision.current(torch.device("cpu")) == before
