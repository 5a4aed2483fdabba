"""What a capture must keep, rule by rule; the network called plainly is the reference."""

import functools
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captured_networks import TwoInputs, ValueControl
from capturing import InParts, Staged, captured, graph_of, outputs_and_gradients, outputs_of, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.capture import Capture, NotCaptured, own_forward
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph, Stage, cut, network_partitions, why_whole
from lightning_hybrid.graph.cut_stages import cut_at
from lightning_hybrid.graph.cuts_and_crossings import Cuts
from lightning_hybrid.graph.mode_regions import modes_of

X = torch.linspace(-1, 1, 20).view(5, 4)
Code = Callable[..., Any]
LOGGER: Any = logging.getLogger(__name__)


class Net(nn.Module):
    """Three linear layers, a buffer, and a function that says how they are used."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("state", torch.zeros(4))
        self.code = code

    def forward(self, *args: Any) -> Any:
        return self.code(self, *args)


@torch.library.custom_op("lightning_hybrid_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda _, gradient: gradient * 7)  # not what autograd would find


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0]  # not what autograd would find


# ---------------------------------------------------------------- operations


def asks_for_its_class(net: Any, x: Tensor) -> Tensor:
    if torch.jit.isinstance(x, Tensor) and not torch.jit.isinstance(x, (int, nn.Module)):
        x = net.a(x)
    return net.c(net.b(x))


def in_no_grad(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    with torch.no_grad():
        g = net.b(h).relu()
    return net.c(h * g)


def in_inference_mode(net: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        net.b(x).sum()
    return net.c(net.a(x))


def in_autocast(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        g = net.c(net.b(h))
    return g.float() + h


def in_vmap(net: Any, x: Tensor) -> Tensor:
    return net.c(torch.vmap(lambda row: net.b(row).sum() * row)(net.a(x)))


def gradient_inside(net: Any, x: Tensor) -> Tensor:
    return net.c(torch.func.grad(lambda v: net.b(v).square().sum())(net.a(x)))


def changed_view(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    part = y[:, :2]
    z = net.b(y.clone())
    part[:, 0] = 1
    return net.c(y + z)


def assigned(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    h[:, 0] = 0
    g = net.b(h)
    g[g < 0] = 0
    return net.c(g)


def aliasing_outputs(net: Any, x: Tensor) -> tuple[Tensor, ...]:
    g = net.b(net.a(x))
    return g, g[:, :2], net.c(g), g


def written_input(net: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return net.c(net.b(net.a(x)))


def written_buffer(net: Any, x: Tensor) -> Tensor:
    net.state.add_(1)
    return net.c(net.b(net.a(x))) + net.state


def replaced_buffer(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    net.state = net.state * 0.9 + h.detach().mean(0) * 0.1
    return net.c(net.b(h)) + net.state


def grown_buffer(net: Any, x: Tensor) -> Tensor:
    net.state = torch.cat([net.state, net.state[-1:] + 1])
    return net.c(net.b(net.a(x))) + net.state.sum()


def written_parameter(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.a.weight.mul_(0.9)
    return net.c(net.b(net.a(x)))


def made_on_the_device(net: Any, x: Tensor) -> Tensor:
    here = torch.ones(x.shape[0], 4, device=x.device) + torch.arange(4, device=x.device)
    return net.c(net.b(net.a(x)) + here)


def checkpointed(net: Any, x: Tensor) -> Tensor:
    return net.c(checkpoint(lambda v: net.b(net.a(v)).relu(), x, use_reentrant=False))


def parameters_given(net: Any, x: Tensor) -> Tensor:
    doubled = {name: value * 2 for name, value in net.b.named_parameters()}
    return net.c(torch.func.functional_call(net.b, doubled, (net.a(x),)))


def powers(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(h**2 + 2**h + h.abs() ** 0.5 + net.b(h) ** torch.tensor(2.0))


def normal(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = net.a(x)
    distribution = torch.distributions.Normal(h, F.softplus(net.b(h)))
    z = distribution.rsample()
    return net.c(z), distribution.log_prob(z)


def categorical(net: Any, x: Tensor) -> tuple[Tensor, ...]:
    h = net.a(x)
    distribution = torch.distributions.Categorical(logits=h)
    return net.c(net.b(h)), distribution.log_prob(distribution.sample()), distribution.entropy()


def boolean_sum(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    positive = h > 0
    return net.c(net.b(h) * positive) / (positive.sum() + 1)


def nonzero(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(net.b(h)[(h[:, 0] > 0).nonzero().squeeze(1)])


def unique(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(net.b(h)) + torch.unique(h.detach().round()).sum()


def masked(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    chosen = h[:, 0] > 0
    out = torch.zeros_like(h)
    out[chosen] = net.b(h[chosen])
    return net.c(out)


def read(net: Any, x: Tensor) -> tuple[Tensor, float]:
    h = net.a(x)
    value = h.sum().item()
    return net.c(net.b(h) * value), value


def of_numpy(net: Any, x: Tensor) -> Tensor:
    scales = torch.from_numpy(np.power(np.array([1.0, 2.0, 3.0, 4.0]), 2).cumsum() * 2).float()
    return net.c(net.b(net.a(x)) * float(np.sqrt(2.0)) * scales)


def nested(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    ragged = torch.nested.as_nested_tensor([h[:1], h[1:]], layout=torch.jagged)
    return net.c(net.b(ragged)).values()


def random_layers(net: Any, x: Tensor) -> Tensor:
    h = F.dropout(net.a(x))
    return net.c(F.gumbel_softmax(net.b(h), hard=True) * torch.rand_like(h))


def kept(net: Any, x: Tensor) -> dict[str, Any]:
    h = net.a(x)
    net.feature = net.b(h)
    return {"out": net.c(net.feature), "hidden": [h, net.feature], "rows": x.shape[0], "none": None}


def hooked_tensor(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    h.register_hook(lambda gradient: gradient * 3)
    return net.c(net.b(h))


EQUAL: list[Code] = [
    asks_for_its_class, in_no_grad, in_inference_mode, in_autocast, in_vmap, gradient_inside,
    changed_view, assigned,
    aliasing_outputs, written_input, written_buffer, replaced_buffer, grown_buffer,
    written_parameter, made_on_the_device, checkpointed, parameters_given, powers, normal,
    categorical, boolean_sum, nonzero, unique, masked, read, of_numpy, nested, random_layers, kept,
    hooked_tensor,
    lambda net, x: net.c(twice(net.b(net.a(x)))),
    lambda net, x: net.c(Doubled.apply(net.b(net.a(x)))),
    lambda net, x: net.c(torch.einsum("bi,ij->bj", net.a(x), net.b.weight)),
]  # fmt: skip


# TorchDynamo makes an object of a custom autograd.Function, which torch warns of
@pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("code", EQUAL, ids=lambda code: code.__name__)
def test_stages_equal_the_network_bit_for_bit_in_two_calls(code: Code) -> None:
    network = Net(code)
    twin, staged = deepcopy(network), Staged(network)
    x, y = X.clone(), X.clone()
    for _ in range(2):
        expected = outputs_and_gradients(twin, twin, x)
        assert same(outputs_and_gradients(network, staged, y), expected)
        assert torch.equal(x, y)


def branching(net: Any, x: Tensor) -> Tensor:
    return net.c(net.a(x) if x.sum() > 0 else net.b(x))


@pytest.mark.parametrize(
    ("code", "args"),
    [
        (branching, (X,)),
        (lambda net, x, g: net.a(x) + torch.rand(4, generator=g), (X, torch.Generator())),
        (lambda net, x: net.a(torch.sparse.mm(torch.eye(5).to_sparse(), x)), (X,)),
        (lambda net, x: net.a(x) * __import__("random").random(), (X,)),
    ],
    ids=["branch on values", "own generator", "sparse", "Python's random numbers"],
)
def test_what_cannot_be_followed_is_refused_before_anything_runs(code: Code, args: Any) -> None:
    network = Net(code)
    state = torch.get_rng_state()
    with pytest.raises(NotCaptured):
        Staged(network)(*args)
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- rules 1 to 5: calls


def test_a_replaced_layer_is_the_one_that_runs() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    staged = Staged(network)
    staged(X)
    network[0] = nn.Linear(4, 4)
    assert torch.equal(staged(X), network(X))
    network[2].weight = nn.Parameter(torch.ones(4, 4))
    assert torch.equal(staged(X), network(X))


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), id="Sequential"),
        pytest.param(
            nn.TransformerEncoderLayer(4, 2, 8),
            id="TransformerEncoderLayer",
            marks=pytest.mark.conformance,
        ),
    ],
)
def test_classes_of_torch_are_captured(network: nn.Module) -> None:
    assert len(graph_of(network, X).layers) > 1


@pytest.mark.conformance
def test_no_number_of_networks_of_a_class_ends_capturing() -> None:
    for _ in range(18):  # more than one code object may be compiled
        assert len(graph_of(nn.Linear(4, 4), X).layers) == 1


def test_an_integer_that_differs_between_two_networks_is_constant_in_each() -> None:
    for width in (4, 6, 8):
        graph = graph_of(nn.Unflatten(1, (2, width // 2)), torch.ones(3, width))
        assert len(graph.leaves) == 1


def test_a_hook_put_on_an_inner_module_between_calls_runs() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    staged = Staged(network)
    staged(X)
    network[0].register_forward_hook(lambda module, args, out: out * 2)
    assert torch.equal(staged(X), network(X))


def test_settings_of_torch_compile_are_the_user_s_again_after_a_call() -> None:
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=3, allow_rnn=False):
        network = nn.LSTM(2, 2)  # followed by our settings alone
        assert len(graph_of(network, torch.ones(3, 1, 2)).layers) > 0
        assert (config.recompile_limit, config.allow_rnn) == (3, False)
        with pytest.raises(NotCaptured):
            captured(ValueControl(), torch.ones(2, 4))
        assert (config.recompile_limit, config.allow_rnn) == (3, False)


def test_the_reason_names_the_line_of_the_user() -> None:
    with pytest.raises(NotCaptured, match=r"captured_networks.py:\d+: `.*if x.sum\(\) > 0"):
        Staged(ValueControl())(X)


# ---------------------------------------------------------------- rules 6 to 8: cuts


@pytest.mark.conformance
def test_code_runs_in_a_process_that_does_not_know_the_network(tmp_path: Path) -> None:
    network = Net(checkpointed)
    found = captured(network, X)
    (code,) = cut_at(found.graph, [])
    state = {name: value.detach() for name, value in network.state_dict().items()}
    file = tmp_path / "stage"
    numbers = found.graph.values_of_numbers(found.graph.sizes(found.leaves))
    given = [*found.leaves, *[numbers[n] for n in code.numbers]]
    file.write_bytes(pickle.dumps((code, state, given)))
    script = (
        "import pickle, sys, torch\n"
        "path = sys.argv[1]\n"
        "code, state, given = pickle.loads(open(path, 'rb').read())\n"
        "assert not any('test_capture' in name for name in sys.modules)\n"
        "run = code.code.function(torch.device('cpu'))\n"
        "out = run(*[state[name] for name in code.tensors], *given)\n"
        "open(path, 'wb').write(pickle.dumps(out))\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", script, str(file)],
        check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    (out,) = pickle.loads(file.read_bytes())
    assert torch.equal(out, network(X))


def test_a_function_that_has_no_name_is_refused_by_name() -> None:
    from lightning_hybrid.graph.stage_code import qualified_name

    with pytest.raises(NetworkError, match=r"calls <function .*lambda.*cannot find by its name"):
        qualified_name(lambda x: x)


def test_no_cut_within_a_transformation_of_functions() -> None:
    graph = graph_of(Net(in_vmap), X)
    cuts = Cuts(graph)
    inside = [p for p in range(1, len(graph.layers)) if not graph.layers[p - 1].effects.ambient]
    assert inside
    assert all(f"({__file__}:" in str(cuts.refusal(position)) for position in inside)


def in_nested_modes(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        h = net.a(x)
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            g = net.b(h.float())
        k = net.c(h)
    return net.c(g) + k


def test_a_cut_within_modes_leaves_and_enters_them() -> None:
    torch.manual_seed(0)
    network = Net(in_nested_modes)
    expected = outputs_and_gradients(network, network, X)
    one = captured(network, X)
    cuts = Cuts(one.graph)
    allowed = [p for p in range(1, len(one.graph.layers)) if cuts.refusal(p) is None]
    modes = modes_of(one.graph)
    assert len({modes[position] for position in allowed}) == 5
    for position in allowed:
        codes = cut_at(one.graph, [position])

        def call(_: Tensor, codes: Any = codes) -> Any:
            outputs = outputs_of(one.graph, codes, one.values)
            assert torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
            return outputs

        assert same(outputs_and_gradients(network, call, X), expected)


RECURRENT = [
    nn.LSTM(4, 2, 2, bidirectional=True),
    *(
        pytest.param(layer, marks=pytest.mark.conformance)
        for layer in (
            nn.GRU(4, 4, batch_first=True),
            nn.RNN(4, 4, nonlinearity="relu"),
            nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True),
        )
    ),
]


@pytest.mark.parametrize("layer", RECURRENT, ids=str)
@pytest.mark.parametrize(
    "autocast",
    [
        pytest.param(False, id="float32"),
        pytest.param(True, id="autocast", marks=pytest.mark.conformance),
    ],
)
def test_recurrent_layers_are_captured_for_all_lengths(layer: nn.RNNBase, autocast: bool) -> None:
    def code(net: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            states, _ = net.layer(net.a(x))
            return net.c(states).mean(1 if layer.batch_first else 0)

    network = Net(code)
    network.layer = layer
    staged = Staged(network)
    for length in (5, 6, 7, 9, 5):
        x = torch.randn(3, length, 4)
        found = outputs_and_gradients(network, staged, x)
        assert same(found, outputs_and_gradients(network, network, x))
    assert [len(codes) for codes in staged.codes.values()] == [3, 3]


class OneRegion(nn.Module):
    """All that it computes is one checkpointed call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, 2 * x, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_network_that_is_one_checkpointed_call_is_refused() -> None:
    with pytest.raises(NotCaptured, match="all of it is one activation checkpoint") as caught:
        graph_of(OneRegion(), X)
    assert "recompute=True" in caught.value.advice


def test_a_cumulative_average_is_captured_bit_for_bit() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4), nn.BatchNorm1d(4)
    ).double()
    other, staged = deepcopy(network), Staged(network)
    for step in range(4):
        x = torch.randn(6, 4, dtype=torch.float64)
        if step == 2:
            network[3].momentum = other[3].momentum = None
        found = outputs_and_gradients(network, staged, x)
        assert same(found, outputs_and_gradients(other, other, x))
    assert all(len(codes) == 2 for codes in staged.codes.values())


def test_code_that_looks_at_an_optimizer_is_refused_and_leaves_it_as_it_is() -> None:
    def scaled(net: Any, x: Tensor) -> Tensor:
        return net.c(net.a(x) * net.optimizers[0].param_groups[0]["lr"])

    network = Net(scaled)
    network.optimizers = [torch.optim.Adam(network.parameters(), lr=0.5)]
    before = deepcopy(network.optimizers[0].state_dict())
    with pytest.raises(NotCaptured, match="its forward looks at an optimizer"):
        graph_of(network, X)
    assert network.optimizers[0].state_dict() == before


def test_no_cut_between_memory_and_the_last_write_into_it() -> None:
    graph = graph_of(Net(changed_view), X)
    names = [layer.module for layer in graph.layers]
    first, second = names.index("a"), names.index("b")
    assert "changes it in place" in str(Cuts(graph).refusal(first + 1))
    assert "changes it in place" in str(Cuts(graph).refusal(second + 1))


def test_outputs_that_share_memory_come_from_one_stage() -> None:
    network = Net(aliasing_outputs)
    graph = graph_of(network, X)
    stages = cut(graph, network_partitions(graph), range(1, len(network_partitions(graph))))
    g, view, *_ = Staged(network)(X)
    assert len(stages) > 1
    g.data.zero_()
    assert not view.any()


# ---------------------------------------------------------------- rules 9 to 13: batches


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [((1, 1), False), pytest.param((2, 1), True, marks=pytest.mark.conformance)],
)
def test_batch_norm_of_one_value_per_sample_is_not_split_into_single_samples(
    sizes: tuple[int, int], splits: bool
) -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    for samples, parts in ((5, 3), (4, 2)):  # 2, 2 and 1; 2 and 2
        found = captured(network, torch.randn(samples, 1, *sizes))
        reason = why_whole(found.graph, found.leaves, parts)
        assert (reason is None) is (splits or samples == 4), reason
        assert reason is None or "needs two samples, and a part has one" in reason
    assert why_whole(captured(network.eval(), found.leaves[0]).graph, found.leaves, 4) is None


def test_a_vector_that_happens_to_be_as_long_as_the_batch_is_passed_whole() -> None:
    kwargs = {"table": torch.randn(2, 3), "weights": torch.randn(2)}
    found = captured(TwoInputs(), torch.randn(2, 1, 8, 8), **kwargs)
    parts = found.graph.split(found.leaves, 2)
    shapes = [{tuple(leaf.shape) for leaf in part} for part in parts]
    assert shapes == [{(1, 1, 8, 8), (1, 3), (2,)}] * 2


def test_a_call_with_one_sample_is_static_and_a_later_one_is_not() -> None:
    staged = Staged(Net(powers))
    staged(X[:1])
    staged(X)
    assert [graph.is_static for graph in staged.graphs] == [True, False]


def test_batch_sizes_need_no_graph_of_their_own() -> None:
    staged = Staged(Net(powers))
    for rows in (2, 3, 5):
        assert torch.equal(staged(X[:rows]), staged.network(X[:rows]))
    assert len(staged.graphs) == 1


# ---------------------------------------------------------------- rules 15 to 19


def test_the_device_of_an_input_is_that_of_the_stage() -> None:
    network = Net(made_on_the_device)
    (code,) = cut_at(graph_of(network, X), [])
    meta = torch.device("meta")
    stage = Stage(code, network.to(meta), meta)
    assert stage([X.to(meta)], [5])[0].device == meta


def test_a_checkpointed_region_keeps_its_saving() -> None:
    def plain(net: Any, x: Tensor) -> Tensor:
        return net.c(net.b(net.a(x)).relu())

    sizes = []
    for code in (plain, checkpointed):
        staged, packed = Staged(Net(code)), []
        staged(X)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, packed=packed: packed.append(t) or t, lambda t: t
        ):
            staged(X)
        sizes.append(sum(t.nbytes for t in packed if not isinstance(t, nn.Parameter)))
    assert sizes[1] < sizes[0]


def test_modes_have_graphs_of_their_own_without_a_reason_for_the_user() -> None:
    staged = Staged(Net(powers))
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            staged(X)
            assert staged.capture.reason is None
    assert len(staged.graphs) == 3


def test_a_value_that_changes_is_the_reason_of_a_capture() -> None:
    network = Net(lambda net, x: net.a(x) * (2 if net.kind == "wide" else 1))
    network.kind = "wide"
    staged = Staged(network)
    staged(X)
    network.kind = "narrow"
    assert torch.equal(staged(X), network(X))
    assert "kind" in str(staged.capture.reason)


def test_a_number_that_changes_in_each_step_is_captured_at_most_twice_again() -> None:
    network = Net(lambda net, x: net.a(x) * net.step * net.rate)
    staged = Staged(network)
    for step in range(2, 8):
        network.step, network.rate = step, 0.5 / step
        assert torch.equal(staged(X), network(X))
    assert len(staged.graphs) <= 3


def test_an_error_of_the_stages_keeps_its_type() -> None:
    staged = Staged(Net(powers))

    def refuse(*_: Any) -> list[Any]:
        raise NetworkError("no")

    staged.capture._run = refuse
    with pytest.raises(NetworkError, match="no"):
        staged(X)


def test_a_batch_of_sixteen_convolved_samples_may_be_split_into_smaller_ones() -> None:
    """Torch computes 16 and more in another way, which is no way of the network's Python."""
    x = torch.randn(24, 1, 5, 5, 5)
    graph = graph_of(nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2)), x)
    assert why_whole(graph, [x], 4) is None


def test_what_the_code_asks_of_the_batch_behind_a_convolution_is_a_condition() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return y * 2 if len(y) > 10 else y

    x = torch.randn(24, 1, 5, 5, 5)
    reason = why_whole(graph_of(Branches(), x), [x], 4)
    assert reason == "its code takes another way for other batch sizes"


def attends_among_samples(net: Any, x: Tensor) -> Tensor:
    q, k, v = (layer(x)[None, None] for layer in (net.a, net.b, net.c))
    return F.scaled_dot_product_attention(q, k, v)[0, 0]


def test_attention_is_no_draw() -> None:
    found = captured(Net(attends_among_samples), X)
    assert not found.graph.uses_rng


def test_dropout_of_attention_weights_is_a_draw() -> None:
    def drops(net: Any, x: Tensor) -> Tensor:
        h = net.a(x).view(-1, 1, 2, 2)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.5).flatten(1)

    assert captured(Net(drops), X).graph.uses_rng


@pytest.mark.conformance
def test_samples_behind_time_are_split_and_time_is_not() -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).double()
    x = torch.randn(5, 6, 4, dtype=torch.float64)
    parts = InParts(layer)
    torch.testing.assert_close(parts(x), layer(x), rtol=1e-10, atol=1e-12)
    assert parts.why_whole is None
    found = captured(layer, x)
    [rows] = [leaf.rows for leaf in found.graph.leaves if leaf.rows is not None]
    assert rows.dim == 1


class LanguageModel(nn.Module):
    """Torch's own encoder and decoder, with masks that nobody says to be causal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.both = nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.both(x, self.encoder(x, mask=mask), tgt_mask=mask)


@pytest.mark.conformance
@pytest.mark.parametrize("training", [True, False])
def test_torch_s_transformers_with_masks_are_one_graph(training: bool) -> None:
    network = LanguageModel().double().train(training)
    x = torch.randn(6, 5, 4, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    with torch.set_grad_enabled(training):
        parts = InParts(network)
        torch.testing.assert_close(parts(x, mask), network(x, mask), rtol=1e-10, atol=1e-12)
    assert parts.why_whole is None


def test_a_warning_that_is_said_once_ends_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.lru_cache
    def warning_once(self: Any, *args: Any) -> None:
        self.warning(*args)

    def warns(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        LOGGER.warning_once("in the middle")
        return net.c(h)

    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    assert len(graph_of(Net(warns), X).layers) == 2


def test_a_reason_is_one_line() -> None:
    with pytest.raises(NotCaptured) as error:
        Staged(ValueControl())(X)
    assert "\n" not in error.value.reason


def test_it_is_told_once_that_torchdynamo_is_done_before_a_new_graph_runs() -> None:
    network, told = Net(lambda net, x: net.b(net.a(x))), list[str]()

    def run(graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        told.append("runs")
        return outputs_of(graph, cut_at(graph, []), values)

    capture = Capture(network, own_forward(network), run, looks=lambda: told.append("looks"))
    for x in (X, X, X[:3]):
        capture((x,), {})
    network.code = lambda net, x: net.c(x)
    capture((X,), {})
    assert told == ["looks", "runs", "runs", "runs", "looks", "runs"]
