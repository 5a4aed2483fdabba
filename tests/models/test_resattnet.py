import pytest
import torch
from torch import fx, nn

from models import ResAttNet3D
from models.resattnet import BasicBlock


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("depth", "stem_kernel", "expected"),
    [(18, 3, 33_140_802), (18, 7, 33_161_026), (34, 3, 63_450_434), (34, 7, 63_470_658)],
)
def test_parameter_counts_of_the_residual_part(depth, stem_kernel, expected) -> None:
    network = ResAttNet3D(depth, stem_kernel=stem_kernel, attention_after=())
    assert parameters(network) == expected


def test_attention_adds_its_own_parameters_after_layers_3_and_4() -> None:
    network = ResAttNet3D()
    assert parameters(network.attention3) == 33_121
    assert parameters(network.attention4) == 131_777
    assert parameters(network) == 33_140_802 + 33_121 + 131_777


@pytest.mark.parametrize(("depth", "convolutions"), [(18, 17), (34, 33)])
def test_depth_counts_the_convolutions_of_the_main_path(depth, convolutions) -> None:
    network = ResAttNet3D(depth, attention_after=())
    side_path = [n for n, _ in network.named_modules() if "shortcut" in n]
    main = [
        m for n, m in network.named_modules() if isinstance(m, nn.Conv3d) and n not in side_path
    ]
    assert len(main) == convolutions


def test_at_the_start_it_equals_the_plain_residual_network() -> None:
    network, plain = ResAttNet3D().eval(), ResAttNet3D(attention_after=()).eval()
    plain.load_state_dict({k: v for k, v in network.state_dict().items() if "attention" not in k})
    x = torch.randn(2, 1, 32, 32, 32)
    assert torch.equal(network(x), plain(x))


@pytest.mark.parametrize("size", [(31, 37, 29), (32, 32, 32), (33, 17, 40)])
def test_any_input_size_is_accepted(size) -> None:
    network = ResAttNet3D(attention_after=(2, 3, 4))
    assert network(torch.randn(2, 1, *size)).shape == (2, 2)


def test_traces_with_fx_down_to_convolutions() -> None:
    network = ResAttNet3D().eval()
    network.attention3.gamma.data.fill_(0.5)
    traced = fx.symbolic_trace(network)
    called = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    assert called >= {n for n, m in network.named_modules() if isinstance(m, nn.Conv3d)}
    for size in ((32, 32, 32), (33, 29, 36)):
        x = torch.randn(2, 1, *size)
        assert torch.equal(traced(x), network(x))


def test_identity_shortcut_only_where_shapes_allow() -> None:
    assert isinstance(BasicBlock(8, 8, stride=1).shortcut, nn.Identity)
    assert isinstance(BasicBlock(8, 16, stride=1).shortcut, nn.Sequential)
    assert isinstance(BasicBlock(8, 8, stride=2).shortcut, nn.Sequential)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 50}, r"\[18, 34\] layers, not depth=50"),
        ({"stem_kernel": 5}, "not stem_kernel=5"),
        ({"attention_after": (4, 5)}, r"attention_after names \[5\]"),
    ],
)
def test_wrong_options_are_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        ResAttNet3D(**options)
