import random
from copy import deepcopy
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from traced_networks import (
    Around,
    DataclassOutput,
    DropPath,
    FunctionalDropout,
    Remembering,
    ResNet,
    Scaled,
    TwoInputs,
    UNet,
    ValueControl,
)

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.network import (
    NetworkGraph,
    cut,
    describe,
    find_boundary,
    network_partitions,
    signature,
    trace,
)
from lightning_hybrid.network.check import run


def stitched(graph: NetworkGraph, *args: Any, **kwargs: Any) -> Any:
    """What the traced layers compute."""
    (stage,) = cut(graph, network_partitions(graph), [])
    return graph.pack(stage(graph.bind(args, kwargs)))


def x4(batch: int = 3) -> Tensor:
    return torch.randn(batch, 4)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_batch_size_stays_free(batch: int) -> None:
    network = ResNet(blocks=(1, 1)).eval()
    graph = trace(network, (torch.randn(2, 1, 16, 16, 16),))
    x = torch.randn(batch, 1, 16, 16, 16)
    assert torch.equal(stitched(graph, x), network(x))


@pytest.mark.parametrize("size", [8, 9])
def test_control_flow_follows_the_sizes(size: int) -> None:
    network, x = UNet(), torch.randn(2, 1, size, 8)
    graph = trace(network, (x,))
    assert torch.equal(stitched(graph, x), network(x))
    assert any("getitem" in layer.name for layer in graph.layers) == (size == 9)


def test_descriptions_give_the_same_graph_as_tensors() -> None:
    network, x = ResNet(blocks=(1, 1)), torch.randn(2, 1, 16, 16, 16)
    args, kwargs = describe((x,), {})
    assert args[0].device.type == "meta"
    assert trace(network, args, kwargs).fingerprint == trace(network, (x,)).fingerprint
    assert trace(UNet(), (torch.ones(2, 1, 8, 8),)).fingerprint != trace(network, args).fingerprint


def test_parameters_without_memory_are_enough() -> None:
    with torch.device("meta"):
        network = ResNet(blocks=(1, 1))
    assert len(trace(network, describe((torch.ones(2, 1, 16, 16, 16),), {})[0]).layers) > 15


def test_tracing_leaves_no_trace() -> None:
    network = Around(nn.Sequential(Remembering(), ValueControl(), nn.BatchNorm1d(4)))
    network.middle[2].eval()
    before = {name: (id(v), v._version, v.clone()) for name, v in network.state_dict().items()}
    x = x4()
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    trace(network, (x,))
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name][2])
        assert value._version == before[name][1]
    assert [m.training for m in network.middle] == [True, True, False]
    assert network.middle[0].seen == []
    assert network.middle[0].last is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(numpy.random.get_state())) == states[1:]
    assert all(p.grad is None for p in network.parameters())


class DrawsPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class NoGrad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2


class BatchControl(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(0)[None] * 2 if x.shape[0] == 1 else x * 2


OPAQUE = [
    ValueControl(),
    Remembering(),
    DropPath(),
    DrawsPython(),
    Checkpointed(True),
    Checkpointed(False),
    NoGrad(),
    BatchControl(),
]


@pytest.mark.parametrize("middle", OPAQUE, ids=lambda m: type(m).__name__)
def test_module_that_cannot_be_followed_is_one_layer(middle: nn.Module) -> None:
    network = Around(middle)
    graph = trace(network, (x4(),))
    assert [layer.module for layer in graph.layers] == ["first", "middle", "last"]
    assert list(graph.opaque) == ["middle"]
    assert graph.layers[1].values[0].batch_dim == (0, 1)
    x = x4(2)
    torch.manual_seed(0), random.seed(0)
    expected = network(x)
    torch.manual_seed(0), random.seed(0)
    assert torch.equal(stitched(graph, x), expected)


class Writer(nn.Module):
    """Leaves a tensor in a list for another module."""

    def __init__(self, board: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.board = nn.Linear(4, 4), board

    def forward(self, x: Tensor) -> Tensor:
        self.board[0] = self.inner(x)
        return x + 1


class Reader(nn.Module):
    def __init__(self, board: list[Tensor], hooked: bool = False) -> None:
        super().__init__()
        self.inner, self.board = nn.Linear(4, 4), board
        if hooked:
            self.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.board[0]


def test_what_modules_hand_each_other_in_a_list_is_an_edge_of_the_graph() -> None:
    board, left = [torch.ones(1)], None
    network = Around(nn.Sequential(Writer(board), Reader(board)))
    left, graph = board[0], trace(network, (x4(),))
    assert not graph.opaque
    assert board[0] is left
    partitions = network_partitions(graph)
    chain, x = cut(graph, partitions, [2]), x4(2)
    (found,) = run(chain, [x])
    assert board[0] is left
    assert torch.equal(found, network(x))


@pytest.mark.parametrize("order", [(Writer, Reader), (Reader, Writer)])
def test_modules_that_remember_in_one_list_stay_together(order: Any) -> None:
    """One of them is opaque, or reads what the last call has left: the list itself is needed."""
    board = [torch.ones(1)]
    pair = [kind(board, hooked=True) if kind is Reader else kind(board) for kind in order]
    network = Around(nn.Sequential(pair[0], nn.Linear(4, 4), pair[1]))
    graph = trace(network, (x4(),))
    assert set(graph.opaque) == {"middle.0", "middle.2"} - {f"middle.{2 * order.index(Reader)}"}
    partitions = network_partitions(graph)
    assert [p.name for p in partitions] == ["first", "middle.0", "last"]
    with pytest.raises(NetworkError, match="change the same attribute"):
        find_boundary(partitions, "middle.2")
    twin, chain = deepcopy(network), cut(graph, partitions, [1, 2])
    for x in (x4(2), x4(2)):
        assert torch.equal(run(chain, [x])[0], twin(x))


def test_hooks_and_parametrizations_still_work() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    calls: list[str] = []
    inner.register_forward_hook(lambda *_: calls.append("hook"))
    network = Around(nn.Sequential(inner, weight_norm(nn.Linear(4, 4))))
    graph, x = trace(network, (x4(),)), x4()
    assert calls == []
    assert torch.equal(stitched(graph, x), network(x))
    assert calls == ["hook", "hook"]


def test_old_hooked_module_keeps_its_weight_norm() -> None:
    network = Around(nn.utils.spectral_norm(nn.Linear(4, 4))).eval()
    graph, x = trace(network, (x4(),)), x4()
    assert torch.equal(stitched(graph, x), network(x))


@pytest.mark.parametrize("training", [True, False])
def test_training_flag_is_read_when_the_graph_runs(training: bool) -> None:
    network, x = FunctionalDropout(), x4(50)
    graph = trace(network, (x,))
    assert graph.training is None
    network.train(training)
    torch.manual_seed(1)
    expected = network(x)
    torch.manual_seed(1)
    assert torch.equal(stitched(graph, x), expected)


class AuxiliaryHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return (x, self.aux(x)) if self.training else x


@pytest.mark.parametrize("training", [True, False])
def test_network_with_two_ways_is_traced_for_its_mode(training: bool) -> None:
    network = AuxiliaryHead().train(training)
    graph = trace(network, (x4(),))
    assert graph.training is training
    assert len(graph.outputs) == 1 + training


def test_arguments_and_outputs_keep_their_structure() -> None:
    network = TwoInputs().eval()
    kwargs = {"table": torch.randn(3, 3), "weights": torch.randn(2), "scaled": True}
    image = torch.randn(3, 1, 8, 8)
    graph = trace(network, (image,), kwargs)
    output = stitched(graph, image, **kwargs)
    assert list(output) == ["logits", "table", "image"]
    assert output["image"] is image
    assert torch.equal(output["logits"], network(image, **kwargs)["logits"])


def test_dataclass_output_is_rebuilt() -> None:
    network, x = DataclassOutput(), torch.randn(2, 3)
    output, expected = stitched(trace(network, (x,)), x), network(x)
    assert output.name == "answer"
    assert torch.equal(output.mean, expected.mean)
    assert torch.equal(output.parts[1], expected.parts[1])


def test_parameters_and_constants_read_directly_stay_live() -> None:
    network = Scaled()
    graph, x = trace(network, (x4(),)), x4(2)
    with torch.no_grad():
        network.scale.mul_(3)
    output, expected = stitched(graph, x), network(x)
    assert torch.equal(output[0], expected[0])
    assert output[1] is network.scale


def test_call_that_differs_is_refused_by_name() -> None:
    kwargs = {"table": torch.ones(3, 3), "weights": torch.ones(2), "scaled": True}
    graph = trace(TwoInputs(), (torch.ones(3, 1, 8, 8),), kwargs)
    with pytest.raises(NetworkError, match=r"kwargs\['scaled'\] is False \(bool\), it was True"):
        graph.bind((torch.ones(3, 1, 8, 8),), {**kwargs, "scaled": False})
    with pytest.raises(NetworkError, match=r"args\[0\] is \(3, 1, 9, 8\)"):
        graph.bind((torch.ones(3, 1, 9, 8),), kwargs)


def test_signature_ignores_the_batch_size_alone() -> None:
    key = signature((torch.ones(3, 4), 1), {})
    assert key == signature((torch.zeros(5, 4), 1), {})
    assert key != signature((torch.ones(3, 5), 1), {})
    assert key != signature((torch.ones(3, 4), True), {})
    assert key != signature((torch.ones(3, 4).double(), 1), {})


def test_split_is_chunk_and_passes_the_rest_whole() -> None:
    weights = torch.ones(4)
    graph = trace(WeightedSum(), (x4(7), weights))
    parts = graph.split([x4(7), weights], 3)
    assert [len(part[0]) for part in parts] == [3, 3, 1]
    assert all(part[1] is weights for part in parts)


class WeightedSum(nn.Module):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return (x * weights).sum(1)


def test_vector_that_happens_to_be_as_long_as_the_batch_is_passed_whole() -> None:
    network = TwoInputs().eval()
    kwargs = {"table": torch.randn(2, 3), "weights": torch.randn(2)}
    graph = trace(network, (torch.randn(2, 1, 8, 8),), kwargs)
    kwargs["table"] = torch.randn(5, 3)
    image = torch.randn(5, 1, 8, 8)
    assert graph.accepts((image,), kwargs)
    assert torch.equal(
        stitched(graph, image, **kwargs)["logits"], network(image, **kwargs)["logits"]
    )
    parts = graph.split(graph.bind((image,), kwargs), 2)
    assert [[len(leaf) for leaf in part] for part in parts] == [[3, 3, 2], [2, 2, 2]]


def test_network_that_cannot_be_followed_says_where() -> None:
    with pytest.raises(NetworkError, match=r"traced_networks.py:\d+: return x \* 2 if x.sum"):
        trace(ValueControl(), (x4(),))


def test_lazy_network_is_refused() -> None:
    with pytest.raises(NetworkError, match=r"'0.weight' has no size yet"):
        trace(nn.Sequential(nn.LazyLinear(2)), (x4(),))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 7  # not what autograd would find


class UsesFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


def test_autograd_function_keeps_its_own_backward() -> None:
    network, x = Around(UsesFunction()), x4().requires_grad_()
    graph = trace(network, (x,))
    assert not graph.opaque
    (expected,) = torch.autograd.grad(network(x).sum(), x)
    (found,) = torch.autograd.grad(stitched(graph, x).sum(), x)
    assert torch.equal(found, expected)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.rnn = nn.LSTM(8, 8, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, (_, memory) = self.rnn(self.embedding(tokens))
        x, _ = self.attention(x, x, x)
        return self.head(x[:, -1]), memory


def test_layers_that_return_several_tensors_are_taken_apart() -> None:
    network, tokens = Sequence(), torch.randint(10, (3, 5))
    graph = trace(network, (tokens,))
    assert [p.name for p in network_partitions(graph)] == ["embedding", "attention", "head"]
    for one, other in zip(stitched(graph, tokens), network(tokens), strict=True):
        assert torch.equal(one, other)


def test_network_can_be_traced_in_inference_mode() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    with torch.inference_mode():
        graph = trace(network, (x4(),))
    assert len(graph.layers) == 3


def test_autocast_is_part_of_the_graph() -> None:
    network, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), x4()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = trace(network, (x,))
        assert torch.equal(stitched(graph, x), network(x))
    assert graph.layers[0].values[0].dtype == torch.bfloat16
    with pytest.raises(NetworkError, match="autocast differs"):
        graph.bind((x,), {})
