"""Networks in which samples meet: in micro-batches they compute what the whole batch does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import InParts, compared, compared_once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.graph.operation_effects import annotate
from lightning_hybrid.graph.rows import Rows

slow = pytest.mark.conformance

Code = Callable[..., Any]
BATCH = 6


class Net(nn.Module):
    """Three layers that make nearly all of the load, and a function that uses them."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("state", torch.zeros(8))
        self.norm = nn.BatchNorm1d(8)
        self.code = code

    def body(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    def forward(self, *args: Any) -> Any:
        return self.code(self, *args)


def inputs(*more: Any) -> tuple[Any, ...]:
    return torch.randn(BATCH, 8, dtype=torch.float64), *more


# ---------------------------------------------------------------- split, with a tail


def loss_inside(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = net.body(x)
    return F.cross_entropy(h, y), h


def class_weights(net: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.arange(1.0, 9, dtype=x.dtype)
    return F.cross_entropy(net.body(x), y, weight)


def token_weighted(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = net.body(x)
    kept = (y > 3).to(h.dtype)
    return (h.sum(1) * kept).sum() / kept.sum(), h.square().mean()


def contrastive(net: Any, x: Tensor, y: Tensor) -> Tensor:
    one, other = net.body(x), net.body(x.flip(-1))
    logits = net.scale.exp() * one @ other.T
    labels = torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def two_views(net: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(net.body(torch.cat([x, x.flip(1)])), dim=1)
    one, other = z[: len(x)], z[len(x) :]
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))


def barlow(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = net.body(x)
    n = (h - h.mean(0)) / (h.var(0) + 1e-3).sqrt()
    return h, net.scale * (n.T @ n / len(x) - torch.eye(8, dtype=x.dtype)).square().sum()


def own_position(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.body(x)[torch.arange(len(x)), y]


def in_place_at_the_end(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.body(x)
    similar = h @ h.T
    similar[:, 0] = 0
    return similar


def without_gradients(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.body(x)
    with torch.no_grad():
        mean = h.mean(0)
    return (h * mean).sum()


def checkpointed(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = checkpoint(net.body, x, use_reentrant=False)
    return F.cross_entropy(h, y) + checkpoint(net.body, x + 1, use_reentrant=False).mean()


def read(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    h = net.body(x)
    return h, h.detach().sum().item()


def shifted_labels(net: Any, x: Tensor, y: Tensor) -> Tensor:
    labels = y.new_zeros(len(y), 2)
    labels[:, 1:] = y[:, None].clone()
    labels[:, 0] = 1
    return F.cross_entropy(net.body(x).view(-1, 4), labels.view(-1) % 4)


def labels_changed_in_place(net: Any, x: Tensor, y: Tensor) -> Tensor:
    y = y.clone()
    y.masked_fill_(y < 4, -100)
    return F.cross_entropy(net.body(x), y)


def number_of_picked(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    at = torch.where(y > 3)[0]
    h = net.body(x)
    return h.index_add(0, at, net.body(h[at])), at.shape[0]


def picked_at_the_end(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = net.body(x)
    return h[y > 3], F.cross_entropy(h[y > 2], y[y > 2])


def mean_of_positions(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return (net.body(x).sum(1) * torch.arange(len(x))).sum()


def weak(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.body(x)
    return h - 1e-9 * h.mean(0)


def in_the_backward(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.body(x)
    mean = h.mean(0)
    return h + (mean - mean.detach())


TAILS: list[Code] = [
    loss_inside, class_weights, contrastive, checkpointed, read, number_of_picked,
    labels_changed_in_place,
]  # fmt: skip
MORE_TAILS: list[Code] = [
    token_weighted, two_views, barlow, own_position, in_place_at_the_end, without_gradients,
    shifted_labels, mean_of_positions, weak, in_the_backward, picked_at_the_end,
]  # fmt: skip

# ---------------------------------------------------------------- split, with a prologue


def mixup(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.body(0.7 * x + 0.3 * x[torch.randperm(len(x))])


def random_mask(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    noise = torch.rand(len(x), 8, dtype=x.dtype)
    kept = noise.argsort(1) < 5
    h = net.body(x * kept)
    return (h - x).square().sum() / (~kept).sum(), kept


def standardised(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.body((x - x.mean(0)) / x.std(0))


def one_draw_for_all(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.body(x * torch.rand(8, dtype=x.dtype))


def near_ones(net: Any, x: Tensor, y: Tensor) -> Tensor:
    near = torch.cdist(x, x) < 4
    h = net.body(x)
    return (h @ h.T).masked_fill(near, 0.0).square().sum()


PROLOGUES: list[Code] = [mixup, random_mask]
MORE_PROLOGUES: list[Code] = [standardised, one_draw_for_all, near_ones]


def also(codes: list[Code], slow_ones: list[Code]) -> Any:
    """Parameters, the second ones in the slow tier."""
    every = [*codes, *(pytest.param(code, marks=slow) for code in slow_ones)]
    return pytest.mark.parametrize("code", every, ids=lambda code: code.__name__)


@also(TAILS + PROLOGUES, MORE_TAILS + MORE_PROLOGUES)
def test_what_needs_all_samples_is_computed_beside_the_micro_batches(code: Code) -> None:
    parts = compared(Net(code), *inputs(torch.randint(8, (BATCH,))))
    assert parts.why_whole is None
    assert parts.counted == 2


def of_all_kinds(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = net.norm(F.dropout(net.body(x * (x.mean(0) < x)), training=True))
    one, other = h.mul_(2).chunk(2, 1)
    return F.cross_entropy(h, y), one, other.view(-1, 2, 2), net.scale * 2


@pytest.mark.parametrize(
    "code", [of_all_kinds, mixup, in_place_at_the_end], ids=["mixed", "mixup", "in_place"]
)
def test_effects_in_the_heavy_part_are_those_that_a_run_of_it_finds(code: Code) -> None:
    parts = InParts(Net(code).double())
    parts(*inputs(torch.randint(8, (BATCH,))))
    assert parts.graph is not None
    assert parts.graph.divided
    found = annotate(parts.graph.graph, parts.graph.attributes, BATCH)
    # (memory has other numbers there, equal ones where these are)
    number = {parts.graph.memory[node]: found.memory[node] for node in found.memory}
    assert {node: number[m] for node, m in parts.graph.memory.items()} == found.memory
    assert len({*number.values()}) == len(number)
    for layer in parts.graph.layers:
        writes = frozenset(map(number.__getitem__, layer.effects.writes))
        results = frozenset(map(number.__getitem__, layer.effects.results))
        same = replace(layer.effects, writes=writes, results=results)
        assert same == found.of[layer.node]


def among_neighbours(net: Any, near: Tensor, x: Tensor) -> Tensor:
    count = near.shape[0]  # (read first, so that it is the first input of the graph)
    return near @ net.body(x.view(count, -1))


def test_sizes_of_a_micro_batch_are_those_of_inputs_that_are_split() -> None:
    network = Net(among_neighbours).double()
    twin, parts = deepcopy(network), InParts(network)
    for size in (BATCH, BATCH - 1):
        near = torch.randn(size, size, dtype=torch.float64)
        compared_once(network, twin, parts, near, inputs()[0][:size])
    assert parts.counted == 2


# ---------------------------------------------------------------- split by proof alone


def folded_behind_time(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x).view(len(x), 8, 64).transpose(0, 1).reshape(-1, 64)
    h = (h - h.mean(1, keepdim=True)).view(8, -1, 64)
    return net.c(net.b(h.transpose(0, 1).flatten(1)))


def repeated(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.c(net.b(net.a(x).repeat(2, 1)[len(x) :]))


def samples_as_channels(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.c(net.b(F.instance_norm(net.a(x).view(len(x), 8, 64)).flatten(1)))


@pytest.mark.parametrize(
    "code", [folded_behind_time, repeated, samples_as_channels], ids=lambda code: code.__name__
)
def test_samples_inside_of_dimensions_are_followed(code: Code) -> None:
    parts = compared(Net(code), *inputs(torch.randint(8, (BATCH,))))
    assert (parts.why_whole, parts.division) == (None, "proof")


class TimeMajor(nn.Module):
    """The batch is put behind time and back; two layers that want it there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.gru = nn.GRU(8, 4, bidirectional=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.gru(self.layer(x.transpose(0, 1)))
        return states.transpose(0, 1), last


class Masked(nn.Module):
    """A mask of the second input, positions, and an embedding, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.layer = nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows, places = torch.arange(len(ids)), torch.arange(ids.shape[1])
        allowed = mask[rows[:, None], places][:, None, None] > 0
        h = self.tokens(ids).view(len(ids), -1, 2, 4).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, allowed).transpose(1, 2).flatten(2)
        return self.head(h)[rows, mask.sum(1) - 1]


def test_samples_behind_time_are_split() -> None:
    parts = compared(TimeMajor(), torch.randn(BATCH, 5, 8, dtype=torch.float64))
    assert parts.why_whole is None


class TimeFirst(nn.Module):
    """The batch is dimension 1 of both inputs, or 0 of a mask."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 3)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h = self.layer(x, *more)
        return self.head(h[0] if isinstance(h, tuple) else h)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize(
    "time",
    [pytest.param(BATCH, id="as long as the batch", marks=slow), pytest.param(5, id="shorter")],
)
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (encoder_layer, ["tb8"]),
        (lambda: nn.LSTM(8, 8), ["tb8"]),
        pytest.param(encoder_layer, ["tb8", "tt", "bt"], marks=slow),
        pytest.param(lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0), ["tb8", "3b8"], marks=slow),
    ],
    ids=["encoder", "LSTM", "masks", "decoder"],
)
def test_a_batch_in_dimension_1_is_split_there(
    make: Callable[[], nn.Module], shapes: list[str], time: int
) -> None:
    torch.manual_seed(1)
    sizes = {"t": time, "b": BATCH, "3": 3, "8": 8}
    args = [torch.randn([sizes[d] for d in shape], dtype=torch.float64) for shape in shapes]
    network = TimeFirst(make()).double()
    twin, parts = deepcopy(network), InParts(network)
    compared_once(network, twin, parts, *args)
    assert (parts.why_whole, parts.counted) == (None, 2)
    assert parts.graph is not None
    assert list(parts.graph.rows.values()) == [Rows(1)]


def test_where_samples_meet_in_both_dimensions_the_batch_goes_whole() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(F.scaled_dot_product_attention(x, x, x)).transpose(0, 1)
            return F.scaled_dot_product_attention(h, h, h)

    parts = InParts(Both().double())
    parts(torch.randn(5, BATCH, 8, dtype=torch.float64))
    assert parts.why_whole is not None
    assert parts.graph is not None
    assert parts.graph.batch == 5  # of dimension 0, as ever


def test_two_inputs_of_one_size_are_one_batch() -> None:
    mask = (torch.arange(5) < torch.tensor([[2], [5], [3], [4], [1], [5]])).long()
    parts = compared(Masked(), torch.randint(9, (BATCH, 5)), mask, microbatches=3)
    assert parts.why_whole is None
    assert parts.counted == 3


def test_inputs_of_several_sizes_are_taken_whole() -> None:
    def code(net: Any, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return net.body(x), net.body(table)

    network = Net(code).double()
    parts = InParts(network)
    x = torch.randn(BATCH, 8, dtype=torch.float64)
    parts(x, x + 1)
    assert parts.counted == 2
    parts(x, x[:4])
    assert parts.why_whole == "its inputs have several batch sizes"


# ---------------------------------------------------------------- whole


def among_samples(net: Any, x: Tensor, y: Tensor) -> Tensor:
    q = net.a(x)[None, None]
    return net.c(net.b(F.scaled_dot_product_attention(q, q, q)[0, 0]))


def centred(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(net.b(h - h.mean(0)))


def sorted_away(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(net.b(h[h[:, 0].argsort()]))


def permuted_by_argument(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.c(net.b(net.a(x)[y % len(x)]))


def divided_by_size(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.c(net.b(net.a(x) / len(x)))


def shared_by_size(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(net.b(h + net.b.weight[len(x) : len(x) + 1]))


def written_buffer(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.body(x)
    with torch.no_grad():
        net.state.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - net.state


def drops_weights(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.c(F.linear(net.a(x), F.dropout(net.b.weight)))


def changed_through_a_view(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x).clone()
    h[0] = 1
    return net.c(net.b(h))


def batch_in_the_last_dimension(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.c(net.b(F.layer_norm(net.a(x).t(), (len(x),)).t()))


def folded_wrongly(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x).view(len(x), 8, 64).transpose(0, 1).reshape(len(x), 8, 64)
    return net.c(net.b(h.flatten(1)))


def next_position(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.c(net.b(net.a(x)[(torch.arange(len(x)) + 1) % len(x)]))


def mean_of_a_class(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(net.b(h.new_zeros(8, 512).index_add(0, y, h)[y]))


def capacity(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    order = F.one_hot(h[:, :4].argmax(1), 4).cumsum(0)
    return net.c(net.b(h * (order.amax(1) < 3)[:, None]))


def descending(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    numbers, order = h[:, :2].argmax(1).sort(descending=True)
    ends = torch.histc(numbers.double(), 2, 0, 1).cumsum(0)
    return net.c(net.b((h[order] * ends[0]).index_add(0, order, h)))


def mean_of_picked(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    at = torch.where(h[:, 0] > 0)[0]
    return net.c(net.b(h.index_add(0, at, h[at] - h[at].mean(0))))


def sized_by_picked(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    at = torch.where(h[:, 0] > 0)[0]
    return net.c(net.b(h.index_add(0, at, h[at] / (at.shape[0] + 1))))


def of_another_mask(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    mask = h[:, 0] > 0
    h = h.clone()
    h[mask.flip(0)] = h[mask].tanh()
    return net.c(net.b(h))


def written_through_a_fold(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    halves = h.view(2, -1, 512)
    halves[0] += halves[1]
    return net.c(net.b(h))


def written_through_a_transpose(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    h.t()[:, 0] = 0
    return net.c(net.b(h))


def cut_out_of_repeated(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.c(net.b(net.a(x).repeat(2, 1)[1 : len(x) + 1]))


def statistic_of_all_that_no_output_needs(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.body(x)
    with torch.no_grad():
        net.norm.running_mean.lerp_(h.mean(0), 0.1)
    return h


def changed_before_its_mean(net: Any, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return net.body(x - x.mean(0))


def changed_after_all_have_met(net: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = net.body(x)
    met = h.detach().t() @ x
    x.mul_(2)
    return h, met


WHOLE = [
    among_samples, permuted_by_argument, written_buffer, drops_weights, folded_wrongly, capacity,
    mean_of_picked, written_through_a_fold, statistic_of_all_that_no_output_needs,
    changed_before_its_mean, changed_after_all_have_met,
]  # fmt: skip
ALSO_WHOLE = [
    centred, sorted_away, divided_by_size, shared_by_size, changed_through_a_view,
    batch_in_the_last_dimension, next_position, mean_of_a_class, descending, sized_by_picked,
    of_another_mask, written_through_a_transpose, cut_out_of_repeated,
]  # fmt: skip


@also(WHOLE, ALSO_WHOLE)
def test_where_much_follows_after_samples_have_met_the_batch_goes_whole(code: Code) -> None:
    parts = InParts(Net(code).double())
    parts(*inputs(torch.randint(8, (BATCH,))))
    assert parts.why_whole is not None
    words = ("samples meet", "changes", "it could not be proven that samples stay apart in")
    assert any(word in parts.why_whole for word in words), parts.why_whole


def test_an_input_that_is_changed_in_place_is_changed_once() -> None:
    def code(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return net.body(x) + (net.scale * y.add_(1)).sum()

    network = Net(code).double()
    x, y = inputs(torch.arange(BATCH))  # (as many as samples, and not theirs)
    parts = InParts(network, 3)
    torch.testing.assert_close(parts(x, y.clone()), network(x, y.clone()), rtol=1e-12, atol=0)
    assert parts.counted == 3


@pytest.mark.parametrize(
    "dropped",
    [lambda h: torch.squeeze(input=h), lambda h: checkpoint(torch.squeeze, h, use_reentrant=False)],
)
def test_single_samples_do_not_lose_their_dimension(dropped: Code) -> None:
    network = Net(lambda net, x: net.body(dropped(x[:, None]))).double()
    parts, (x,) = InParts(network, BATCH), inputs()
    assert parts(x).shape == x.shape
    assert "needs two samples" in str(parts.why_whole)


def test_the_reason_names_the_operator_its_place_and_the_load_behind_it() -> None:
    parts = InParts(Net(centred).double())
    parts(*inputs(torch.randint(8, (BATCH,))))
    words = parts.why_whole or ""
    assert words.startswith("samples meet in 'mean' (mean), ")
    assert "test_three_parts.py:" in words
    assert words.endswith("% of the load follows")


def by_strides(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = net.a(x)
    return net.c(net.b(h.as_strided(h.shape, (512, 1))))


def after_a_table(net: Any, x: Tensor, y: Tensor) -> Tensor:
    h = torch.cat([net.b.weight[:4], net.a(x)])
    return net.c(net.b(h)[4:])


@pytest.mark.parametrize(
    ("code", "instead"),
    [
        (by_strides, "Write it with other operators of torch."),
        (after_a_table, "Keep the batch a dimension of its own, "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_samples_are_said_to_meet_only_where_they_were_seen_to(code: Code, instead: str) -> None:
    parts = InParts(Net(code).double())
    parts(*inputs(torch.randint(8, (BATCH,))))
    words = parts.why_whole or ""
    assert words.startswith("it could not be proven that samples stay apart in ")
    assert f"of the load follows. {instead}" in words


@also(
    [among_samples, centred, permuted_by_argument], [sorted_away, divided_by_size, mean_of_a_class]
)
def test_where_samples_were_seen_to_meet_it_is_said(code: Code) -> None:
    parts = InParts(Net(code).double())
    parts(*inputs(torch.randint(8, (BATCH,))))
    assert str(parts.why_whole).startswith("samples meet in ")
