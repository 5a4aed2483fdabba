"""Ways in which samples of a batch meet, at the start and at the end of a network.

Each network is called in uneven micro-batches, and must return, derive and keep what it does for
the whole batch, however it was divided. The second half is of networks in which samples seem to
meet and do not: those are split.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import InParts, outputs_and_gradients
from torch import Tensor, nn

Meeting = Callable[["Net", Tensor, Tensor], Tensor]
BATCH, TIME, WIDTH, MICROBATCHES = 8, 4, 8, 3  # (batch and width of one size: also by accident)


class Net(nn.Module):
    """A meeting before, between or after two heavy parts; samples are (time, width)."""

    def __init__(self, meeting: Meeting, place: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.meeting, self.place = meeting, place
        self.one = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH))
        self.two = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.table = nn.Embedding(64, WIDTH)
        self.register_buffer("queue", torch.randn(16, WIDTH))
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.place == "end":
            return self.meeting(self, self.two(self.one(x)), y)
        if self.place == "middle":
            return self.two(self.meeting(self, self.one(x), y))
        return self.two(self.one(self.meeting(self, x, y)))


def attention_with_time_first_by_default(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return net.attention(h, h, h, need_weights=False)[0]


def encoder_layer_with_time_first_by_default(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return net.layer(h)


def recurrent_with_time_first_by_default(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return net.lstm(h)[0]


def rows_attend(net: Net, h: Tensor, y: Tensor) -> Tensor:
    rows = h.reshape(1, h.shape[0], -1)
    return F.scaled_dot_product_attention(rows, rows, rows).reshape(h.shape)


def heads_in_place_of_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    q = h.view(h.shape[0], h.shape[1], 2, -1).permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(q, q, q).permute(2, 0, 1, 3).reshape(h.shape)


def view_that_should_transpose(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return h + h.view(h.shape[1], h.shape[0], -1).mean(0)[:, None]


def statistics_of_folded_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    flat = h.reshape(-1, h.shape[-1])
    variance, mean = torch.var_mean(flat, 0)
    return ((flat - mean) / (variance + 0.1).sqrt()).view(h.shape)


def standard_deviation_of_groups(net: Net, h: Tensor, y: Tensor) -> Tensor:
    groups = h.reshape(2, -1, *h.shape[1:])
    return h + (groups.var(0) + 0.1).sqrt().mean((1, 2), keepdim=True).repeat(2, 1, 1)


def layer_norm_over_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    turned = h.permute(1, 2, 0)
    return F.layer_norm(turned, turned.shape[-1:]).permute(2, 0, 1)


def median_of_all(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return h - h.median(0).values


def quantised_by_the_largest(net: Net, h: Tensor, y: Tensor) -> Tensor:
    scale = h.detach().abs().amax() / 7
    return h + ((h / scale).round() * scale - h).detach()


def running_sum_of_folded_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return h.reshape(-1, h.shape[-1]).cumsum(0).view(h.shape)


def rolled_when_folded(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return h.reshape(-1, h.shape[-1]).roll(1, 0).view(h.shape)


def sample_before(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return h + F.pad(h, (0, 0, 0, 0, 1, 0))[:-1]


def token_before_when_folded(net: Net, h: Tensor, y: Tensor) -> Tensor:
    flat = h.reshape(-1, h.shape[-1])
    return (flat + F.pad(flat, (0, 0, 1, 0))[:-1]).view(h.shape)


def strides_across_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    h = h.contiguous()
    return h + torch.as_strided(h, h.shape, (0, h.shape[2], 1))


def pairs_of_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    pairs = h.view(-1, 2, *h.shape[1:])
    return (pairs + pairs.mean(1, keepdim=True)).view(h.shape)


def every_second_sample(net: Net, h: Tensor, y: Tensor) -> Tensor:
    changed = h.clone()
    changed[::2] = changed[::2] + changed[1::2]
    return changed


def resized_along_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    turned = h.permute(1, 2, 0)
    larger = F.interpolate(turned, scale_factor=2, mode="linear")
    return larger[..., : turned.shape[-1]].permute(2, 0, 1)


def nearest_sample(net: Net, h: Tensor, y: Tensor) -> Tensor:
    flat = h.flatten(1)
    return h + h[torch.cdist(flat, flat).topk(2, largest=False).indices[:, 1]]


def largest_two(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return h + h.topk(2, dim=0).values.mean(0)


def frequency_of_labels(net: Net, h: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=8).to(h.dtype)
    return h / counts.clamp(min=1)[y][:, None, None]


def centres_of_classes(net: Net, h: Tensor, y: Tensor) -> Tensor:
    sums = h.new_zeros(8, h.shape[-1]).index_add(0, y, h.mean(1))
    return h - sums[y][:, None]


def features_in_place_of_tokens(net: Net, h: Tensor, y: Tensor) -> Tensor:
    wanted = (torch.arange(h.shape[1]) < (y % h.shape[1])[:, None])[..., None].expand_as(h)
    return h.masked_scatter(wanted, net.table.weight[: h.shape[0] * h.shape[1]])


def experts_with_capacity(net: Net, h: Tensor, y: Tensor) -> Tensor:
    tokens = h.reshape(-1, h.shape[-1])
    gate, expert = net.router(tokens).softmax(-1).max(-1)
    chosen = F.one_hot(expert, 4)
    kept = (chosen.cumsum(0) * chosen).sum(-1) <= 6
    moved = torch.bmm(tokens[:, None], net.experts[expert])[:, 0]
    return (tokens + moved * (gate * kept)[:, None]).view(h.shape)


def queue_of_keys(net: Net, h: Tensor, y: Tensor) -> Tensor:
    keys = h.mean(1)
    near = (keys @ net.queue.clone().T).logsumexp(-1)
    with torch.no_grad():
        net.queue[: len(keys)] = keys
    return h + near[:, None, None]


def moving_centre(net: Net, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        net.centre.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
    return h - net.centre


def divided_by_their_number(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return h / h.shape[0]


class NormedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / gradient.norm()


def only_in_the_backward(net: Net, h: Tensor, y: Tensor) -> Tensor:
    out: Tensor = NormedGradient.apply(h)  # type: ignore[no-untyped-call]
    return out


def mapped_over_time(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(lambda s: s - s.mean(0), in_dims=1, out_dims=1)(h)


def fourier_over_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return torch.fft.fft(h, dim=0).real


def fourier_over_everything(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return h + torch.fft.irfftn(torch.fft.rfftn(h) * 0.5, s=h.shape)


def response_among_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return F.local_response_norm(h.transpose(0, 1), 3, 0.5).transpose(0, 1)


def response_among_folded_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return F.local_response_norm(h.reshape(1, -1, h.shape[-1]), 3, 0.5).view(h.shape)


def one_sample_replaced(net: Net, h: Tensor, y: Tensor) -> Tensor:
    h = h.clone()
    h[0] = h[-1].clone()
    return h


def all_replaced_through_a_fold(net: Net, h: Tensor, y: Tensor) -> Tensor:
    h = h.clone()
    h.view(-1, h.shape[-1])[:: h.shape[1]] = h.mean((0, 1))
    return h


def written_where_another_mask_is(net: Net, h: Tensor, y: Tensor) -> Tensor:
    h = h.clone()
    h[(y > 3).flip(0)] = 0
    return h


def written_after_they_have_met(net: Net, h: Tensor, y: Tensor) -> Tensor:
    h, mean = h.clone(), h.mean(0)
    h[:, 0] = 0
    return h - mean


def bags_of_two_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    of = (y[:, None] + torch.arange(4)).flatten()
    some = F.embedding_bag(of, net.table.weight, torch.arange(0, len(of), 8), mode="sum")
    return h + some.repeat_interleave(2, 0)[:, None]


MEET: list[Meeting] = [
    fourier_over_samples, one_sample_replaced, written_after_they_have_met,
    attention_with_time_first_by_default, rows_attend, view_that_should_transpose,
    running_sum_of_folded_samples, sample_before, frequency_of_labels, queue_of_keys,
    only_in_the_backward,
]  # fmt: skip
ALSO_MEET: list[Meeting] = [
    fourier_over_everything, response_among_samples, response_among_folded_samples,
    all_replaced_through_a_fold, written_where_another_mask_is, bags_of_two_samples,
    encoder_layer_with_time_first_by_default, recurrent_with_time_first_by_default,
    heads_in_place_of_samples, standard_deviation_of_groups, rolled_when_folded,
    token_before_when_folded, strides_across_samples, pairs_of_samples, nearest_sample,
    centres_of_classes, features_in_place_of_tokens, experts_with_capacity, moving_centre,
    statistics_of_folded_samples, layer_norm_over_samples, median_of_all,
    quantised_by_the_largest, every_second_sample, resized_along_samples, largest_two,
    divided_by_their_number, mapped_over_time,
]  # fmt: skip
slow = pytest.mark.conformance


@pytest.mark.parametrize("place", ["start", pytest.param("end", marks=slow)])
@pytest.mark.parametrize(
    "meeting",
    [*MEET, *(pytest.param(meeting, marks=slow) for meeting in ALSO_MEET)],
    ids=lambda meeting: meeting.__name__,
)
def test_samples_that_meet_meet_all(meeting: Meeting, place: str) -> None:
    compare(meeting, place)


# ---------------------------------------------------------------- they do not meet


def time_first(net: Net, h: Tensor, y: Tensor) -> Tensor:
    turned = h.transpose(0, 1)
    return net.lstm(net.attention(turned, turned, turned)[0])[0].transpose(0, 1)


def folded_windows(net: Net, h: Tensor, y: Tensor) -> Tensor:
    windows = h.view(len(h), 2, h.shape[1] // 2, -1).flatten(0, 1)
    return F.scaled_dot_product_attention(windows, windows, windows).view(h.shape)


def views_in_one_batch(net: Net, h: Tensor, y: Tensor) -> Tensor:
    one, other = torch.tanh(torch.cat([h, h.flip(1)])).chunk(2)
    return one * other


def own_token(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return h + h[torch.arange(len(h)), y % h.shape[1]][:, None]


def mapped_over_samples(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(lambda s: s - s.mean(0))(h)


def own_expert(net: Net, h: Tensor, y: Tensor) -> Tensor:
    tokens = h.flatten(0, 1)
    expert = net.router(tokens).argmax(-1)
    return torch.bmm(tokens[:, None], net.experts[expert])[:, 0].view(h.shape)


def beams(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(h.repeat_interleave(2, 0)).view(len(h), 2, *h.shape[1:]).sum(1)


def padding_set_to_zero(net: Net, h: Tensor, y: Tensor) -> Tensor:
    h[torch.arange(h.shape[1]) > (y % h.shape[1])[:, None]] = 0
    return h


def classes_masked(net: Net, h: Tensor, y: Tensor) -> Tensor:
    h[:, :, net.queue[0] > 0] = -9.0
    h[h < -8] += 1
    return h


def boxes(net: Net, h: Tensor, y: Tensor) -> Tensor:
    h[..., 2:4] += h[..., :2]
    out = torch.empty_like(h)
    out[..., :4], out[..., 4:] = h[..., :4].sigmoid(), h[..., 4:] - h[..., :4]
    return out


def padded_attention_with_weights(net: Net, h: Tensor, y: Tensor) -> Tensor:
    padded = torch.arange(h.shape[1]) > (y % h.shape[1])[:, None]
    turned = h.transpose(0, 1)
    out, weights = net.attention(turned, turned, turned, key_padding_mask=padded)
    return out.transpose(0, 1) + weights.sum(1)[..., None]


def fourier_over_time(net: Net, h: Tensor, y: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(h, dim=1) * torch.polar(net.queue[0].abs(), net.queue[1])
    mixed = torch.fft.fft(torch.fft.fft(h, dim=2), dim=1)
    return torch.fft.irfft(spectrum, n=h.shape[1], dim=1) + (mixed * mixed.conj()).real.sqrt()


def response_among_channels(net: Net, h: Tensor, y: Tensor) -> Tensor:
    wide = F.local_response_norm(h[..., None].expand(-1, -1, -1, 2), 3, 0.5).sum(-1)
    return wide + F.local_response_norm(h, 2, 0.5)


def weighted_bags(net: Net, h: Tensor, y: Tensor) -> Tensor:
    of = y[:, None] + torch.arange(h.shape[1])
    some = F.embedding_bag(of, net.table.weight, mode="sum", per_sample_weights=h[..., 0])
    return h + (some + F.embedding_bag(of, net.table.weight, mode="max"))[:, None]


APART: list[Meeting] = [
    padding_set_to_zero, classes_masked, boxes, padded_attention_with_weights, fourier_over_time,
    response_among_channels, weighted_bags, time_first, folded_windows, views_in_one_batch,
    own_token, mapped_over_samples, own_expert, beams,
]  # fmt: skip


@pytest.mark.parametrize("apart", APART, ids=lambda apart: apart.__name__)
@pytest.mark.parametrize("place", ["middle", pytest.param("end", marks=slow)])
def test_samples_that_only_seem_to_meet_are_split(apart: Meeting, place: str) -> None:
    assert compare(apart, place).division == "proof"


@pytest.mark.parametrize("last", [padding_set_to_zero, classes_masked, boxes])
def test_what_is_assigned_last_is_split(last: Meeting) -> None:
    assert compare(last, "end").division == "proof"


def compare(meeting: Meeting, place: str) -> InParts:
    """A call in micro-batches with one of the whole batch; the second batch is a smaller one."""
    net = Net(meeting, place).double()
    twin = deepcopy(net)
    parts = InParts(net, MICROBATCHES)
    for batch in (BATCH, BATCH - 2):
        torch.manual_seed(batch)
        x = torch.randn(batch, TIME, WIDTH, dtype=torch.float64, requires_grad=True)
        y = torch.randint(0, batch, (batch,))
        expected = outputs_and_gradients(twin, twin, x, y)
        found = outputs_and_gradients(net, parts, x, y)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    return parts
