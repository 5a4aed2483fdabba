import pytest
import torch
from torch import Tensor, nn

from models import GradCAM3D, ResAttNet3D


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


def test_a_map_without_evidence_stays_zero(volume) -> None:
    assert not GradCAM3D(BrightSpot(), "features")(torch.zeros_like(volume), 1).any()


def test_weights_are_pooled_over_three_axes() -> None:
    network = nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 120, 2)
    )
    x = torch.randn(1, 1, 4, 5, 6)
    activation = network[1](network[0](x)).detach().requires_grad_()
    network[3](network[2](activation))[0, 1].backward()
    weights = activation.grad.mean(dim=(2, 3, 4), keepdim=True)
    expected = (weights * activation).sum(1, keepdim=True).relu()
    torch.testing.assert_close(GradCAM3D(network, "1")(x, 1), expected / expected.max())


def test_classes_are_chosen_per_sample(volume) -> None:
    network = ResAttNet3D()
    explain = GradCAM3D(network, "layer2")
    x = torch.randn(2, 1, 33, 33, 33)
    both = explain(x, torch.tensor([0, 1]))
    torch.testing.assert_close(both[:1], explain(x[:1], 0))
    torch.testing.assert_close(both[1:], explain(x[1:], 1))
    chosen = network.eval()(x).argmax(1)
    torch.testing.assert_close(explain(x), explain(x, chosen))


def test_a_mirrored_volume_gives_the_mirrored_map() -> None:
    network = ResAttNet3D(attention_after=())
    for module in network.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = (module.weight + module.weight.flip(2)) / 2
    x = torch.randn(1, 1, 33, 33, 33)
    explain = GradCAM3D(network, "layer3")
    torch.testing.assert_close(explain(x.flip(2), 1), explain(x, 1).flip(2), rtol=1e-3, atol=1e-4)


def test_leaves_the_network_as_it_was() -> None:
    network = ResAttNet3D().train()
    network.layer1.eval()
    x, before = torch.randn(2, 1, 32, 32, 32), snapshot(network)
    statistics = [b.clone() for b in network.buffers()]
    GradCAM3D(network)(x)
    assert snapshot(network) == before
    assert all(torch.equal(a, b) for a, b in zip(statistics, network.buffers()))


def test_leaves_no_hook_behind_when_the_network_fails() -> None:
    network = ResAttNet3D()
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
        GradCAM3D(ResAttNet3D(), "layer5")


def test_layers_that_cannot_be_explained_are_refused(volume) -> None:
    network = ResAttNet3D()
    with pytest.raises(ValueError, match=r"'flatten' puts out shape \(1, 512\)"):
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
