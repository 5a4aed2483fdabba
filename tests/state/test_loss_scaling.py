"""Gradients are unscaled as torch's own scaler does it."""

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.state.clipping_and_loss_scale import unscale

SCALE = 2.0**7


def unscaled_by_torch(gradients: list[Tensor]) -> tuple[list[Tensor], bool]:
    """The gradients, and whether the step would be skipped."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))  # makes the scale a tensor
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    stepped = any(parameter.any() for parameter in parameters)
    return [p.grad for p in parameters if p.grad is not None], not stepped


@pytest.mark.parametrize("special", [1.0, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_and_verdict_are_those_of_the_scaler_of_torch(
    dtype: torch.dtype, special: float
) -> None:
    gradients = [torch.randn(3, 4).to(dtype), torch.tensor([5.0, special, 0.0], dtype=dtype)]
    expected, skipped = unscaled_by_torch(gradients)
    assert unscale(gradients, torch.tensor(1 / SCALE)) == skipped
    for found, wanted in zip(gradients, expected):
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


def test_a_rank_without_gradients_stops_no_step() -> None:
    assert unscale([], torch.tensor(0.5)) is False


def test_gradients_of_half_precision_are_refused_before_any_is_changed() -> None:
    gradients = [torch.ones(2), torch.ones(2, dtype=torch.float16)]
    with pytest.raises(ValueError, match=r"float16.*\.half\(\)"):
        unscale(gradients, torch.tensor(0.5))
    assert gradients[0].tolist() == [1, 1]
