import pytest
import torch
from monai.visualize import GradCAM
from torch import Tensor, nn

from models import GradCAM3D, ResAttNet3D
from models.maps import GradCAMPlusPlus3D, HiResCAM3D, is_empty
from models.maps.common import to_size

SMALL = (8, 8, 16, 16)


class BrightSpot(nn.Sequential):
    """Class 1 scores the mean brightness, class 0 the mean darkness."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv3d(1, 2, 3, stride=2, padding=1, bias=False)
        self.pool = nn.AdaptiveAvgPool3d(1)
        self.flatten = nn.Flatten()
        self.scores = nn.Linear(2, 2)
        with torch.no_grad():
            self.features.weight[0], self.features.weight[1] = 1.0, -1.0
            self.scores.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


@pytest.fixture
def volume() -> Tensor:
    x = torch.zeros(2, 1, 16, 20, 18)
    x[0, 0, 3:6, 13:16, 8:11] = 1
    x[1, 0, 11:14, 2:5, 2:5] = 1
    return x


def snapshot(network: nn.Module) -> list[object]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules()]
    return [hooks, [m.training for m in network.modules()], [p.grad for p in network.parameters()]]


def test_highlights_the_planted_spot(volume) -> None:
    cam = GradCAM3D(BrightSpot(), "features")(volume, 1)
    assert cam.shape == volume.shape
    for sample, seen in zip(volume, cam):
        assert sample.flatten()[seen.argmax()] == 1
        assert seen[sample > 0].mean() > 5 * seen.mean()


def test_each_map_is_divided_by_its_own_maximum(volume) -> None:
    volume[1] *= 100
    cam = GradCAM3D(BrightSpot(), "features")(volume, 1)
    torch.testing.assert_close(cam.amax(dim=(1, 2, 3, 4)), torch.ones(2))
    assert cam.min() >= 0


def test_a_map_without_evidence_stays_zero_and_is_flagged(volume) -> None:
    volume[0] = 0
    found = GradCAM3D(BrightSpot(), "features")(volume, 1)
    assert not found[0].any()
    assert is_empty(found).tolist() == [True, False]


def test_a_layer_that_works_in_place_does_not_change_what_was_recorded() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 120, 2)]
    x = torch.randn(1, 1, 4, 5, 6)
    expected = GradCAM3D(nn.Sequential(*layers), "0")(x, 1)
    layers[1] = nn.ReLU(inplace=True)
    torch.testing.assert_close(GradCAM3D(nn.Sequential(*layers), "0")(x, 1), expected)


@pytest.mark.parametrize("layer", ["layer1", "layer2.0", "layer3"])
@pytest.mark.parametrize("chosen", [0, 1])
def test_equals_the_map_of_monai_without_its_inversion(layer, chosen) -> None:
    torch.manual_seed(1)
    network = ResAttNet3D(widths=SMALL).eval()
    x = torch.randn(2, 1, 33, 37, 40)
    # it spreads the cells of a layer evenly, and so brings maps to another place
    theirs = GradCAM(
        network,
        layer,
        upsampler=lambda size: lambda cam: to_size(cam, size, network),
        postprocessing=lambda cam: cam,
    )(x, class_idx=chosen)
    theirs = theirs / theirs.amax(dim=(1, 2, 3, 4), keepdim=True).clamp_min(1e-12)
    torch.testing.assert_close(GradCAM3D(network, layer)(x, chosen), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(64, 64, 64), (60, 71, 66)])
@pytest.mark.parametrize(("layer", "place"), [("layer1", 28), ("layer2", 24)])
def test_the_map_of_a_bright_point_lies_around_that_point(layer, place, size) -> None:
    """All weights are alike, so that nothing but the place of the cells can move the map."""
    network = ResAttNet3D(widths=(2, 2, 2, 2), attention_after=())
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.fill_(0.1 if weight.ndim > 1 else 1.0 if name.endswith("weight") else 0.0)
    x = torch.zeros(1, 1, *size)
    x[0, 0, place, place, place] = 1
    found = HiResCAM3D(network, layer)(x, 1)[0, 0]
    middle = (found > 0.7).nonzero().double().mean(dim=0)
    assert (middle - place).abs().max() <= 0.5


def test_cells_of_even_kernels_are_spread_evenly() -> None:
    network = nn.Sequential(nn.AvgPool3d(8), nn.AdaptiveAvgPool3d(1), nn.Flatten())
    x = torch.zeros(1, 1, 32, 32, 32)
    x[..., 8:16, 8:16, 8:16] = 1
    found = HiResCAM3D(network, "0")(x, 0)[0, 0]
    middle = (found > 0.7).nonzero().double().mean(dim=0)
    assert (middle - 11.5).abs().max() == 0


def test_plus_plus_equals_the_derivatives_of_the_exponential_score() -> None:
    """On a network that is linear behind the layer, the paper's derivatives can be taken alone."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 24, 2)
    ).double()
    x = torch.randn(1, 1, 2, 3, 4, dtype=torch.float64)
    activation = network[1](network[0](x)).detach()

    def score(flat: Tensor) -> Tensor:
        return network[3](flat[None])[0, 1].exp()

    flat = activation.flatten()
    weights = torch.zeros(3, dtype=torch.float64)
    slope = torch.autograd.functional.jacobian(score, flat)
    for voxel in range(flat.numel()):
        direction = torch.zeros_like(flat)
        direction[voxel] = 1

        def along(t: Tensor, direction: Tensor = direction) -> Tensor:
            return score(flat + t * direction)

        derivatives = [torch.zeros((), dtype=torch.float64, requires_grad=True)]
        value = along(derivatives[0])
        for _ in range(3):
            (value,) = torch.autograd.grad(value, derivatives[0], create_graph=True)
            derivatives.append(value)
        channel = voxel // 24
        below = 2 * derivatives[2] + activation[0, channel].sum() * derivatives[3]
        share = (derivatives[2] / below).detach()
        weights[channel] += share * slope[voxel].relu()
    expected = (weights[None, :, None, None, None] * activation).sum(1, keepdim=True).relu()
    found = GradCAMPlusPlus3D(network, "1")(x, 1)
    torch.testing.assert_close(found.double(), expected / expected.max(), rtol=0, atol=1e-6)


def test_weights_are_pooled_over_three_axes() -> None:
    network = nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 120, 2)
    )
    x = torch.randn(1, 1, 4, 5, 6)
    activation = network[1](network[0](x)).detach().requires_grad_()
    network[3](network[2](activation))[0, 1].backward()
    weights = activation.grad.mean(dim=(2, 3, 4), keepdim=True)
    expected = (weights * activation).sum(1, keepdim=True).relu()
    found = GradCAM3D(network, "1")(x, 1)
    torch.testing.assert_close(found, expected / expected.max(), rtol=0, atol=1e-6)


def test_hirescam_is_the_share_of_each_voxel_in_the_score_of_a_linear_head() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 120, 2)
    )
    x = torch.randn(1, 1, 4, 5, 6)
    activation = network[1](network[0](x)).detach()
    # without autograd: the head's own weights say what each activation adds to the score
    shares = (network[3].weight[1].detach().reshape(activation.shape) * activation).sum(1, True)
    score = network(x)[0, 1] - network[3].bias[1]
    torch.testing.assert_close(shares.sum(), score.detach())
    expected = shares.relu() / shares.max()
    torch.testing.assert_close(HiResCAM3D(network, "1")(x, 1), expected, rtol=0, atol=1e-6)


def test_classes_are_chosen_per_sample(volume) -> None:
    network = ResAttNet3D(widths=SMALL)
    explain = GradCAM3D(network, "layer2")
    x = torch.randn(2, 1, 33, 33, 33)
    both = explain(x, torch.tensor([0, 1]))
    torch.testing.assert_close(both[:1], explain(x[:1], 0))
    torch.testing.assert_close(both[1:], explain(x[1:], 1))
    chosen = network.eval()(x).argmax(1)
    torch.testing.assert_close(explain(x), explain(x, chosen))


def test_a_mirrored_volume_gives_the_mirrored_map() -> None:
    network = ResAttNet3D(widths=SMALL, attention_after=())
    for module in network.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = (module.weight + module.weight.flip(2)) / 2
    x = torch.randn(1, 1, 33, 33, 33)
    explain = GradCAM3D(network, "layer3")
    torch.testing.assert_close(explain(x.flip(2), 1), explain(x, 1).flip(2), rtol=1e-3, atol=1e-4)


def test_leaves_the_network_as_it_was() -> None:
    network = ResAttNet3D(widths=SMALL).train()
    network.layer1.eval()
    x, before = torch.randn(2, 1, 32, 32, 32), snapshot(network)
    statistics = [b.clone() for b in network.buffers()]
    GradCAM3D(network)(x)
    assert snapshot(network) == before
    assert all(torch.equal(a, b) for a, b in zip(statistics, network.buffers()))


def test_leaves_no_hook_behind_when_the_network_fails() -> None:
    network = ResAttNet3D(widths=SMALL)
    before = snapshot(network)
    with pytest.raises(RuntimeError):
        GradCAM3D(network)(torch.randn(1, 3, 32, 32, 32))
    assert snapshot(network) == before


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(guard, volume) -> None:
    explain = GradCAM3D(BrightSpot(), "features")
    expected = explain(volume, 1)
    with guard():
        torch.testing.assert_close(explain(volume.clone(), 1), expected)


def test_works_on_a_frozen_network(volume) -> None:
    frozen = BrightSpot().requires_grad_(False)
    assert GradCAM3D(frozen, "features")(volume, 1).amax() == 1


def test_an_unknown_layer_is_answered_with_those_close_to_it() -> None:
    with pytest.raises(ValueError, match=r"no layer 'layer5'; close to it: .*layer4"):
        GradCAM3D(ResAttNet3D(widths=SMALL), "layer5")


def test_layers_that_cannot_be_explained_are_refused(volume) -> None:
    network = ResAttNet3D(widths=SMALL)
    with pytest.raises(ValueError, match=r"'flatten' puts out shape \(1, 16\)"):
        GradCAM3D(network, "flatten")(torch.randn(1, 1, 32, 32, 32))
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        GradCAM3D(BrightSpot(), "features")(volume, 2)
    with pytest.raises(ValueError, match="one for each of 2"):
        GradCAM3D(BrightSpot(), "features")(volume, torch.tensor([0, 1, 1]))
    network.unused = network.layer1
    with pytest.raises(RuntimeError, match="ran 2 times"):
        GradCAM3D(nn.Sequential(network.stem, network.layer1, network.layer1), "1")(
            torch.randn(1, 1, 32, 32, 32)
        )
