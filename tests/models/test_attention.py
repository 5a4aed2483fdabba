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


def test_an_explicit_map_too_large_is_refused_with_its_size_and_sdpa_takes_it() -> None:
    x = torch.zeros(1, 8, 21, 21, 21)
    with pytest.raises(ValueError, match=r"9261 voxels .* 0\.32 GiB per sample.*'sdpa'"):
        SelfAttention3D(8, kind="explicit")(x)
    assert SelfAttention3D(8)(x).shape == x.shape


def test_both_kinds_give_the_same_numbers_and_gradients() -> None:
    explicit = SelfAttention3D(16, reduction=2, kind="explicit").double()
    explicit.gamma.data.fill_(0.7)
    fused = SelfAttention3D(16, reduction=2).double()
    fused.load_state_dict(explicit.state_dict())
    x = torch.randn(2, 16, 3, 4, 5, dtype=torch.float64)
    for attention in (explicit, fused):
        attention(x).square().sum().backward()
    torch.testing.assert_close(fused(x), explicit(x), rtol=0, atol=1e-10)
    for (name, a), b in zip(explicit.named_parameters(), fused.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize(("kind", "stored"), [("sdpa", False), ("explicit", True)])
def test_only_the_explicit_kind_stores_the_map_for_the_backward(kind, stored) -> None:
    attention = SelfAttention3D(16, kind=kind)
    sizes = []
    x = torch.randn(1, 16, 8, 8, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        attention(x)
    assert (max(sizes) >= 512**2) == stored


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'flash'"):
        SelfAttention3D(16, kind="flash")


def test_too_few_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="4 channels cannot be reduced by 8"):
        SelfAttention3D(4)
