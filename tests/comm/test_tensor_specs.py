"""A spec tells all that a receiver needs."""

import pytest
import torch
from torch import Tensor

from lightning_hybrid.comm.tensor_specs import TensorSpec, bytes_of

CPU = torch.device("cpu")


def test_memory_made_from_a_spec_takes_the_tensor() -> None:
    tensor = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    spec = TensorSpec.of(tensor)
    assert spec == TensorSpec((2, 3), torch.bfloat16, requires_grad=True, on_cpu=True)
    for made in (spec.empty(CPU), spec.zeros(CPU), spec.empty_in_own_memory()):
        assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
    assert not spec.zeros(CPU).any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 3),
        torch.rand(4, 3).t(),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)[1:],
        torch.rand(2, 6).permute(1, 0)[::2],  # with gaps
        torch.rand(3, 1).expand(3, 4),
        torch.rand(3, dtype=torch.complex64).conj(),
        torch.rand(3, dtype=torch.complex64).conj().imag,
        torch.rand(0, 3).t(),
        torch.rand(()),
    ],
)
def test_the_numbers_arrive_in_the_order_that_they_have_in_memory(tensor: Tensor) -> None:
    spec = TensorSpec.of(tensor)
    there = spec.empty(CPU)
    bytes_of(there).copy_(bytes_of(spec.laid_out(tensor)))
    assert torch.equal(there, tensor)
    assert there.stride() == tensor.clone().stride() or not tensor.numel()


@pytest.mark.parametrize("tensor", [torch.rand(600, 700), torch.rand(600, 700, 2).transpose(0, 2)])
def test_memory_of_its_own_has_the_order_of_the_tensor(tensor: Tensor) -> None:
    spec = TensorSpec.of(tensor)
    made = spec.empty_in_own_memory()
    assert made.stride() == spec.empty(CPU).stride()
    assert made.copy_(tensor).equal(tensor)
    assert made.untyped_storage().nbytes() == tensor.nbytes


def test_what_fills_its_memory_travels_without_a_copy() -> None:
    tensor = torch.rand(4, 3).t()
    assert TensorSpec.of(tensor).laid_out(tensor).data_ptr() == tensor.data_ptr()


def test_another_order_than_the_peer_expects_is_exchanged() -> None:
    tensor = torch.rand(4, 3)
    spec = TensorSpec.of(torch.empty(3, 4).t())
    assert torch.equal(spec.laid_out(tensor), tensor)
    assert spec.laid_out(tensor).stride() == (1, 4)
