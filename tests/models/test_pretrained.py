"""Weights of other networks to start from: by name and shape, exactly, with a word on the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from monai.networks.nets import ResNet
from torch import nn

from models import ResAttNet3D
from models.classifier import ResAttNetClassifier
from models.errors import UseError
from models.pretrained import freeze, start_from

WIDTHS = (4, 8, 8, 16)
SAME = {"widths": WIDTHS, "stem_kernel": 7, "stem_stride": 1, "attention_after": ()}


def monais(**options) -> nn.Module:
    """MONAI's ResNet-18 with statistics and biases that are not those of a new one."""
    torch.manual_seed(0)
    network = ResNet("basic", [2] * 4, list(WIDTHS), 3, 1, num_classes=3, **options)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.bias)
    return network.double().eval()


def features(network: nn.Module, image: torch.Tensor) -> torch.Tensor:
    """What the last layer of either network sees."""
    seen: list[torch.Tensor] = []
    last = network.fc if hasattr(network, "fc") else network.classifier
    last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network(image)
    return seen[0]


def test_weights_of_monai_give_the_features_of_monai(tmp_path):
    """With the bias before a batch normalisation, which this network does not have."""
    theirs = monais()
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    ours = ResAttNet3D(**SAME).double().eval()
    said = start_from(ours, tmp_path / "model.pt")
    image = torch.randn(2, 1, 33, 32, 30, dtype=torch.float64)
    torch.testing.assert_close(features(ours, image), features(theirs, image), rtol=0, atol=1e-10)
    assert "layer4 30 of 30" in said
    assert "classifier 0 of 2" in said
    assert "not used: fc.weight, fc.bias" in said


@pytest.mark.parametrize("wrap", ["module.", "module.backbone.", ""])
def test_a_file_like_medicalnets_is_taken_without_what_it_lacks(tmp_path, wrap):
    """Wrapped, under ``state_dict``, without parameters on its shortcuts, with another head."""
    theirs = monais(shortcut_type="A").state_dict()
    file = {f"{wrap}{name}": value for name, value in theirs.items() if name[:2] != "fc"}
    file[f"{wrap}conv_seg.0.weight"] = torch.zeros(3)
    torch.save({"state_dict": file, "epoch": 90}, tmp_path / "resnet_18.pth")
    ours = ResAttNet3D(widths=WIDTHS, stem_kernel=7)
    before = ours.attention3.state_dict()["gamma"].clone()
    said = start_from(ours, tmp_path / "resnet_18.pth")
    assert torch.equal(ours.stem.conv.weight, theirs["conv1.weight"].float())
    assert torch.equal(ours.layer3[1].conv2.weight, theirs["layer3.1.conv2.weight"].float())
    assert torch.equal(ours.attention3.state_dict()["gamma"], before)
    assert "stem 6 of 6" in said
    assert "layer2 24 of 30" in said  # the convolution of its shortcut is new
    assert "conv_seg.0.weight" in said


def test_another_kernel_is_named_and_the_rest_taken(tmp_path):
    torch.save(monais().state_dict(), tmp_path / "model.pt")
    ours = ResAttNet3D(widths=WIDTHS, stem_kernel=3)
    before = ours.stem.conv.weight.detach().clone()
    said = start_from(ours, tmp_path / "model.pt")
    assert "stem.conv.weight is (4, 1, 7, 7, 7) there and (4, 1, 3, 3, 3) here, not taken" in said
    assert torch.equal(ours.stem.conv.weight, before)


def test_a_bundle_is_a_folder_and_monais_networks_take_it_too(tmp_path):
    (tmp_path / "models").mkdir()
    wanted = monais()
    torch.save({"model": wanted.state_dict()}, tmp_path / "models" / "model.pt")
    other = monais()
    nn.init.zeros_(other.layer1[0].conv1.weight)
    assert "fc 2 of 2" in start_from(other, tmp_path)
    for name, value in wanted.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_what_holds_no_weights_for_it_is_refused_and_changes_nothing(tmp_path):
    ours = ResAttNet3D(widths=WIDTHS)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    torch.save({"conv1.weight": torch.zeros(2, 2)}, tmp_path / "flat.pt")
    with pytest.raises(UseError, match=r"no weights for this network.*--model.widths"):
        start_from(ours, tmp_path / "flat.pt")
    (tmp_path / "page.pt").write_text("<!DOCTYPE html>")
    for path in (tmp_path / "page.pt", tmp_path, tmp_path / "missing.pth"):
        with pytest.raises(UseError, match="cannot be read as weights"):
            start_from(ours, path)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_frozen_parts_stay_as_they_are_through_steps_of_training():
    model = ResAttNetClassifier(widths=list(WIDTHS), freeze=["stem", "layer1"], learning_rate=0.1)
    model.train()
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    optimizer = model.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 1, 32, 32, 32)).square().sum().backward()
        optimizer.step()
    changed = {n for n, v in model.network.state_dict().items() if not torch.equal(v, before[n])}
    assert changed
    assert not [name for name in changed if name.startswith(("stem.", "layer1."))]
    assert any("layer2" in name and "running_mean" in name for name in changed)
    with pytest.raises(UseError, match=r"no part 'layer9'.*stem, layer1"):
        freeze(model.network, ["layer9"])


def test_fit_takes_them_by_its_option(trained, tmp_path, monkeypatch, capsys):
    from test_models_cli import command, smaller

    config = Path(smaller("demo", trained, tmp_path))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    bundle = tmp_path / "weights.pt"
    torch.save({"layer1.0.conv1.weight": torch.zeros(1)}, bundle)
    with pytest.raises(SystemExit):
        command(monkeypatch, "fit", "--config", str(config), "--init", str(bundle))
    assert "no weights for this network" in capsys.readouterr().err
