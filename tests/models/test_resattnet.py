import copy

import pytest
import torch
from torch import fx, nn

from models import ResAttNet3D, ResAttNetClassifier
from models.attention import SelfAttention3D
from models.resattnet import BasicBlock


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("depth", "stem_kernel", "expected"),
    [
        (18, 3, 33_140_802),
        (18, 7, 33_161_026),
        pytest.param(34, 3, 63_450_434, marks=pytest.mark.conformance),
        pytest.param(34, 7, 63_470_658, marks=pytest.mark.conformance),
    ],
)
def test_parameter_counts_of_the_residual_part(depth, stem_kernel, expected) -> None:
    with torch.device("meta"):
        network = ResAttNet3D(depth, stem_kernel=stem_kernel, attention_after=())
    assert parameters(network) == expected


def test_attention_adds_its_own_parameters_after_layers_3_and_4() -> None:
    with torch.device("meta"):
        network = ResAttNet3D()
    assert parameters(network.attention3) == 33_121
    assert parameters(network.attention4) == 131_777
    assert parameters(network) == 33_140_802 + 33_121 + 131_777


@pytest.mark.parametrize(("width", "expected"), [(256, 263_169), (512, 1_050_625)])
def test_attention_of_full_width_has_the_parameters_of_four_linear_maps(width, expected) -> None:
    assert parameters(SelfAttention3D(width, reduction=1)) == expected


def test_channels_of_the_input_and_the_width_of_the_attention_reach_their_layers() -> None:
    network = ResAttNet3D(widths=(8, 8, 16, 16), in_channels=2, attention_reduction=4)
    assert network.stem.conv.weight.shape == (8, 2, 3, 3, 3)
    assert network.attention4.query.weight.shape == (4, 16, 1, 1, 1)
    assert network(torch.randn(2, 2, 32, 32, 32)).shape == (2, 2)
    with pytest.raises(RuntimeError, match="2 channels"):
        network(torch.randn(2, 1, 32, 32, 32))
    model = ResAttNetClassifier(widths=[8, 8, 16, 16], in_channels=2, attention_reduction=4)
    assert model.network.stem.conv.in_channels == 2
    assert model.network.attention3.query.out_channels == 4


def test_halved_widths_quarter_the_convolutions() -> None:
    network = ResAttNet3D(widths=(32, 64, 128, 256), attention_after=())
    with torch.device("meta"):
        whole = ResAttNet3D(attention_after=())
    assert network.layer4[1].conv2.weight.numel() * 4 == whole.layer4[1].conv2.weight.numel()
    assert network(torch.randn(2, 1, 32, 32, 32)).shape == (2, 2)


@pytest.mark.parametrize(
    ("options", "cells"),
    [
        ({}, (8, 10)),
        ({"stem_pool": False}, (16, 20)),
        ({"stem_stride": 1}, (16, 20)),
        ({"stem_stride": 1, "stem_pool": False, "stem_kernel": 5}, (32, 40)),
    ],
)
def test_the_stem_decides_the_cells_of_layer1(options, cells) -> None:
    network = ResAttNet3D(widths=(8, 8, 8, 8), **options)
    out = network.layer1(network.stem(torch.randn(1, 1, 32, 40, 32)))
    assert out.shape == (1, 8, *cells, cells[0])


def test_recomputed_blocks_train_the_same_network() -> None:
    torch.manual_seed(0)
    plain = ResAttNet3D(widths=(8, 16, 16, 16)).double()
    again = ResAttNet3D(widths=(8, 16, 16, 16), recompute=(1, 2, 3, 4)).double()
    again.load_state_dict(plain.state_dict())
    x = torch.randn(2, 1, 32, 32, 32, dtype=torch.float64)
    kept = {}
    for network in (plain, again):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            loss = network(x).square().sum()
        kept[network] = sum(sizes)
        loss.backward()
    for (name, a), b in zip(plain.named_parameters(), again.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10, msg=name)
    # the running statistics too: recomputation must not count a batch twice
    for (name, a), b in zip(plain.named_buffers(), again.buffers()):
        assert torch.equal(a, b), name
    assert kept[again] < kept[plain]


def test_a_recomputed_block_is_captured_as_a_region_of_a_graph_with_the_same_gradients() -> None:
    block = BasicBlock(2, 4, stride=2, recompute=True).double()
    other, captured = copy.deepcopy(block), []
    x = torch.randn(2, 2, 4, 4, 4, dtype=torch.float64)

    def take(graph, _):
        captured.append(graph)
        return graph

    torch.compile(other, backend=take, fullgraph=True)(x).square().sum().backward()
    block(x).square().sum().backward()
    [graph] = captured
    assert "tag_activation_checkpoint" in {str(node.target) for node in graph.graph.nodes}
    for (name, a), b in zip(block.named_parameters(), other.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12, msg=name)
    for (name, a), b in zip(block.named_buffers(), other.buffers()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)


def test_layers_that_are_frozen_learn_no_statistics_when_they_run_again() -> None:
    block = BasicBlock(4, 8, stride=2, recompute=True)
    block.bn1.eval()
    block(torch.randn(2, 4, 8, 8, 8, requires_grad=True)).sum().backward()
    counts = [int(m.num_batches_tracked) for m in (block.bn1, block.bn2, block.shortcut[1])]
    assert counts == [0, 1, 1]
    assert torch.equal(block.bn1.running_mean, torch.zeros(8))


def test_dropout_acts_in_training_only() -> None:
    network, x = ResAttNet3D(dropout=0.5, widths=(8, 8, 8, 8)), torch.randn(1, 1, 32, 32, 32)
    network.eval()
    assert torch.equal(network(x), network(x))
    network.dropout.train()
    assert not torch.equal(network(x), network(x))


@pytest.mark.conformance
def test_equal_when_compiled() -> None:
    network = ResAttNet3D(widths=(8, 16, 16, 16)).eval()
    network.attention3.gamma.data.fill_(0.5)
    x = torch.randn(2, 1, 33, 32, 31)
    with torch.no_grad():
        # the graph is what is tested, not the C++ compiler of the machine
        compiled = torch.compile(network, backend="aot_eager")
        torch.testing.assert_close(compiled(x), network(x), rtol=1e-4, atol=1e-4)


def test_channels_last_changes_where_numbers_lie_and_not_what_they_are() -> None:
    network, other = (
        ResAttNet3D(widths=(8, 16, 16, 16), channels_last=last).eval() for last in (False, True)
    )
    network.attention3.gamma.data.fill_(0.5)
    other.load_state_dict(network.state_dict())
    x = torch.randn(2, 1, 33, 32, 31)
    with torch.no_grad():
        torch.testing.assert_close(other(x), network(x), rtol=1e-4, atol=1e-4)
        for parts in (2, 5):  # before and behind an attention block
            features = nn.Sequential(*list(other)[:parts])(x)
            assert not features.is_contiguous()
            assert features.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize(("depth", "convolutions"), [(18, 17), (34, 33)])
def test_depth_counts_the_convolutions_of_the_main_path(depth, convolutions) -> None:
    network = ResAttNet3D(depth, widths=(8, 8, 16, 16), attention_after=())
    side_path = [n for n, _ in network.named_modules() if "shortcut" in n]
    main = [
        m for n, m in network.named_modules() if isinstance(m, nn.Conv3d) and n not in side_path
    ]
    assert len(main) == convolutions


def test_at_the_start_it_equals_the_plain_residual_network() -> None:
    network, plain = (
        ResAttNet3D(widths=(8, 8, 16, 16), attention_after=after).eval() for after in ((3, 4), ())
    )
    plain.load_state_dict({k: v for k, v in network.state_dict().items() if "attention" not in k})
    x = torch.randn(2, 1, 32, 32, 32)
    assert torch.equal(network(x), plain(x))


@pytest.mark.parametrize("size", [(31, 37, 29), (32, 32, 32), (33, 17, 40)])
def test_any_input_size_is_accepted(size) -> None:
    network = ResAttNet3D(widths=(8, 8, 16, 16), attention_after=(2, 3, 4))
    assert network(torch.randn(2, 1, *size)).shape == (2, 2)


def test_traces_with_fx_down_to_convolutions() -> None:
    network = ResAttNet3D(widths=(8, 8, 16, 16)).eval()
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
        ({"stem_kernel": 4}, "not stem_kernel=4"),
        ({"attention_after": (4, 5)}, r"attention_after names \[5\]"),
        ({"recompute": (0,)}, r"recompute names \[0\]"),
        ({"stem_stride": 3}, "not stem_stride=3"),
        ({"widths": (8, 16)}, r"four widths.*\[8, 16\]"),
        ({"dropout": 1.0}, "not 1.0"),
    ],
)
def test_wrong_options_are_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        ResAttNet3D(**options)
