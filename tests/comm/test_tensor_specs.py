"""A spec tells all that a receiver needs."""

import torch

from lightning_hybrid.comm.tensor_specs import TensorSpec

CPU = torch.device("cpu")


def test_memory_made_from_a_spec_takes_the_tensor() -> None:
    tensor = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    spec = TensorSpec.of(tensor)
    assert spec == TensorSpec((2, 3), torch.bfloat16, requires_grad=True)
    for made in (spec.empty(CPU), spec.zeros(CPU)):
        assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
    assert not spec.zeros(CPU).any()
