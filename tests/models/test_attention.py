import pytest
import torch

from models.attention import SelfAttention3D


def test_rows_of_the_attention_map_sum_to_one() -> None:
    attention = SelfAttention3D(16)
    weights = attention.attention_map(torch.randn(2, 16, 3, 4, 5))
    assert weights.shape == (2, 60, 60)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 60))


def test_fresh_block_is_the_identity() -> None:
    x = torch.randn(2, 16, 3, 4, 5)
    assert torch.equal(SelfAttention3D(16)(x), x)


def test_forward_equals_the_explicit_formula() -> None:
    attention = SelfAttention3D(16).double()
    attention.gamma.data.fill_(0.7)
    x = torch.randn(2, 16, 3, 4, 5, dtype=torch.float64)
    value = attention.value(x)
    mixed = attention.attention_map(x) @ value.flatten(2).transpose(1, 2)
    expected = x + 0.7 * attention.project(mixed.transpose(1, 2).reshape_as(value))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-10)


def test_every_voxel_sees_every_other() -> None:
    attention = SelfAttention3D(16)
    attention.gamma.data.fill_(1.0)
    x = torch.randn(1, 16, 3, 3, 3, requires_grad=True)
    attention(x)[0, :, 0, 0, 0].sum().backward()
    assert x.grad is not None
    assert (x.grad.abs().sum(dim=1) > 0).all()


def test_a_map_too_large_is_refused_with_its_size() -> None:
    attention = SelfAttention3D(8)
    with pytest.raises(ValueError, match=r"2 x 27000 voxels .* 5\.4 GiB"):
        attention.attention_map(torch.zeros(2, 8, 30, 30, 30))


def test_too_few_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="4 channels cannot be reduced by 8"):
        SelfAttention3D(4)
