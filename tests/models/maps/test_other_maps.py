import pytest
import torch
from torch import Tensor, nn

from models import ResAttNet3D
from models.maps import (
    AttentionMap3D,
    InputGradient3D,
    IntegratedGradients3D,
    Occlusion3D,
    SmoothGrad3D,
    is_empty,
)
from models.maps.gradient import smoothed


class LeftBrightness(nn.Module):
    """Class 1 scores the brightness of the first half of the first axis, class 0 nothing."""

    def forward(self, x: Tensor) -> Tensor:
        half = x[:, :, : x.shape[2] // 2].sum(dim=(1, 2, 3, 4))
        return torch.stack([torch.zeros_like(half), half], dim=1)


@pytest.fixture
def small() -> ResAttNet3D:
    torch.manual_seed(0)
    return ResAttNet3D(widths=(8, 8, 16, 16)).train()


def methods(network: nn.Module) -> list:
    return [
        InputGradient3D(network),
        SmoothGrad3D(network, copies=2),
        IntegratedGradients3D(network, steps=2),
        Occlusion3D(network, size=16, stride=16),
        AttentionMap3D(network, "attention3"),
    ]


def test_integrated_gradients_add_up_to_the_difference_of_the_scores(small) -> None:
    x = torch.randn(2, 1, 20, 22, 24)
    found = IntegratedGradients3D(small, steps=60).attributions(x, 1)
    small.eval()
    with torch.no_grad():
        ends = [small(volume).diff(dim=1)[:, 0] for volume in (x, torch.zeros_like(x))]
    torch.testing.assert_close(found.sum((1, 2, 3, 4)), ends[0] - ends[1], rtol=0.02, atol=2e-3)


def test_integrated_gradients_of_a_sum_are_the_voxels_that_are_added() -> None:
    x = torch.rand(1, 1, 8, 8, 8) - 0.2
    found = IntegratedGradients3D(LeftBrightness(), steps=3, sigma=0)(x, 1)
    expected = x.clamp_min(0)
    expected[:, :, 4:] = 0
    torch.testing.assert_close(found, expected / expected.max())


def test_smoothgrad_of_no_noise_is_the_gradient_and_draws_nothing_else(small) -> None:
    x = torch.randn(1, 1, 20, 22, 24)
    before = torch.get_rng_state()
    for noise, same in ((0.0, True), (0.3, False)):
        found = SmoothGrad3D(small, copies=2, noise=noise)(x, 1)
        torch.testing.assert_close(found, SmoothGrad3D(small, copies=2, noise=noise)(x, 1))
        assert torch.allclose(found, InputGradient3D(small)(x, 1), atol=1e-5) is same
    assert torch.equal(torch.get_rng_state(), before)


def test_the_input_gradient_is_that_of_autograd(small) -> None:
    x = torch.randn(2, 1, 20, 22, 24)
    small.eval()
    given = x.clone().requires_grad_()
    scores = small(given)
    (scores[:, 1] - scores[:, 0]).sum().backward()
    expected = given.grad.abs()
    expected = expected / expected.amax(dim=(1, 2, 3, 4), keepdim=True)
    found = InputGradient3D(small, sigma=0)(x, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_smoothing_is_a_gaussian_that_keeps_the_mass() -> None:
    spot = torch.zeros(1, 1, 21, 21, 21)
    spot[0, 0, 10, 10, 10] = 1
    found = smoothed(spot, 2.0)
    assert found.sum() == pytest.approx(1, abs=1e-5)
    assert found[0, 0, 12, 10, 10] / found.max() == pytest.approx(torch.exp(torch.tensor(-0.5)))


def test_occlusion_shows_where_the_score_comes_from() -> None:
    x = torch.zeros(1, 1, 12, 12, 12)
    x[0, 0, 3, 3, 3] = x[0, 0, 9, 9, 9] = 1  # only the first one counts
    found = Occlusion3D(LeftBrightness(), size=3, stride=3)(x, 1)
    expected = torch.zeros(1, 1, 12, 12, 12)
    expected[0, 0, 3:6, 3:6, 3:6] = 1
    assert torch.equal(found, expected)


def test_occlusion_is_the_mean_over_the_boxes_that_cover_a_voxel() -> None:
    """Compared with a mean over all boxes, one by one."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(5 * 6 * 7, 2))
    x = torch.randn(1, 1, 5, 6, 7)
    before = network(x)[0, 1]
    fall, covered = torch.zeros(5, 6, 7), torch.zeros(5, 6, 7)
    for i in (0, 2, 3):  # the last box ends at the border
        for j in (0, 2, 4):
            for k in (0, 2, 4, 5):
                changed = x.clone()
                changed[0, 0, i : i + 2, j : j + 2, k : k + 2] = 0
                fall[i : i + 2, j : j + 2, k : k + 2] += (before - network(changed)[0, 1]).detach()
                covered[i : i + 2, j : j + 2, k : k + 2] += 1
    expected = (fall / covered).relu()
    found = Occlusion3D(network, size=2, stride=2, at_once=7)(x, 1)[0, 0]
    torch.testing.assert_close(found, expected / expected.max(), rtol=0, atol=1e-5)


def test_where_covering_raises_the_score_the_map_is_zero_and_not_inverted() -> None:
    x = -torch.ones(1, 1, 8, 8, 8)
    assert is_empty(Occlusion3D(LeftBrightness(), size=4, stride=4)(x, 1)).tolist() == [True]


def test_an_attention_map_is_the_mean_of_the_rows_of_beta(small) -> None:
    small.eval()
    small.attention3.gamma.data.fill_(0.5)
    x = torch.randn(2, 1, 64, 48, 64)
    with torch.no_grad():
        features = small.layer3(small.layer2(small.layer1(small.stem(x))))
        given = small.attention3.attention_map(features).mean(dim=1)
    expected = given.reshape(2, 1, *features.shape[2:])
    found = AttentionMap3D(small, "attention3")(x)[:, :, ::16, ::16, ::16]  # where the cells lie
    torch.testing.assert_close(found, expected / expected.amax((1, 2, 3, 4), True))


def test_attention_that_the_network_ignores_has_an_empty_map(small) -> None:
    assert is_empty(AttentionMap3D(small, "attention3")(torch.randn(1, 1, 32, 32, 32))).all()


def test_only_attention_has_attention_maps(small) -> None:
    with pytest.raises(ValueError, match=r"'layer3' is a Sequential.*attention3, attention4"):
        AttentionMap3D(small, "layer3")


def test_samples_of_a_batch_do_not_mix(small) -> None:
    small.attention3.gamma.data.fill_(0.5)
    x = torch.randn(2, 1, 32, 32, 32)
    for method in methods(small):
        both = method(x, torch.tensor([0, 1]))
        torch.testing.assert_close(both[:1], method(x[:1], 0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(both[1:], method(x[1:], 1), rtol=1e-4, atol=1e-5)


def test_the_network_is_left_as_it_was(small) -> None:
    small.layer1.eval()
    buffers = [buffer.clone() for buffer in small.buffers()]
    modes = [module.training for module in small.modules()]
    with torch.inference_mode():
        for method in methods(small):
            method(torch.randn(1, 1, 32, 32, 32))
    assert [module.training for module in small.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(buffers, small.buffers()))
    assert all(p.grad is None for p in small.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small.modules())


@pytest.mark.parametrize("options", [{"size": 2, "stride": 3}, {"stride": 0}, {"at_once": 0}])
def test_boxes_that_leave_gaps_are_refused(options) -> None:
    with pytest.raises(ValueError, match="1 <= stride <= size"):
        Occlusion3D(nn.Identity(), **options)
