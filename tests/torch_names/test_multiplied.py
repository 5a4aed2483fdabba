"""Many tensors of any kind are multiplied by one number."""

import pytest
import torch

from lightning_hybrid._torch.tensors import multiply_each


@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_tensors_of_any_kind_are_rounded_once(factor: float) -> None:
    torch.manual_seed(0)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
    tensors = [torch.randn(5, 2, dtype=dtype) for dtype in dtypes for _ in range(2)]
    rows = torch.tensor([[0, 3, 4]])
    sparse = torch.sparse_coo_tensor(rows, torch.randn(3, 2), (5, 2), check_invariants=True)
    expected = [tensor * factor for tensor in (*tensors, sparse.to_dense())]
    multiply_each([*tensors, sparse], torch.tensor(factor, dtype=torch.float64))
    for found, wanted in zip((*tensors, sparse.to_dense()), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_number_that_the_host_cannot_read_is_not_read() -> None:
    tensors = [torch.ones(3, device="meta"), torch.ones(3, device="meta", dtype=torch.bfloat16)]
    multiply_each(tensors, torch.ones((), dtype=torch.float64, device="meta"))
