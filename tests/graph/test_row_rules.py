"""Every rule of an operator against the operator: on the whole batch, and on its micro-batches.

A case says which dimensions of its tensors are one and the same ("ij,jk" of a matrix product).
Each of these is made the samples', in turn, alone and as a part of a dimension; whatever the rule
says of the result must be so, or it must say that samples meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_hybrid._torch.tensors import python_dispatcher
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.graph.graph import joined, slices
from lightning_hybrid.graph.row_proof import Labelling
from lightning_hybrid.graph.rows import MEET, Label, Rows

aten = torch.ops.aten
BATCH = 4
SIZES = {"i": 3, "j": 5, "k": 2, "l": 6, "m": 8, "h": 7, "w": 9, "o": 1}

# name: what is computed, and the dimensions of the tensors; ":n" integers below n, ":b" booleans
CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "add": (lambda x, y: x + y, "ij,ij"),
    "add, broadcast": (lambda x, y: x + y, "ijk,jo"),
    "where": (torch.where, "ij:b,ij,j"),
    "masked_fill": (lambda x, m: x.masked_fill(m, 7.0), "ij,ij:b"),
    "add in place": (lambda x, y: x.clone().add_(y), "ij,j"),
    "copy": (lambda x, y: x.clone().copy_(y), "ij,j"),
    "fill": (lambda x: torch.zeros_like(x).fill_(3), "ij"),
    "assign a column": (lambda x, y: _assigned(x, y), "ij,i"),
    "assign where": (lambda x, m: _put(x, m), "ijk,ij:b"),
    "assign a row": (lambda x, y: _assigned_row(x, y), "ij,j"),
    "view, flatten": (lambda x: x.flatten(0, 1), "ijk"),
    "view, flatten last": (lambda x: x.flatten(1), "ijk"),
    "view, unflatten": (lambda x: x.view(*x.shape[:1], 2, 3), "il"),
    "view, unflatten first": (lambda x: x.view(2, -1, *x.shape[1:]), "mi"),
    "view, heads": (lambda x: x.view(x.shape[0], x.shape[1], 2, 3).transpose(1, 2), "ijl"),
    "view, regroup": (lambda x: x.reshape(-1, 2), "im"),
    "expand": (lambda x: x.expand(-1, 4, -1), "ioj"),
    "repeat": (lambda x: x.repeat(2, 3), "ij"),
    "repeat new": (lambda x: x.repeat(2, 1, 1), "ij"),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), "ij"),
    "permute": (lambda x: x.permute(2, 0, 1), "ijk"),
    "transpose": (lambda x: x.transpose(-1, 0), "ijk"),
    "t": (lambda x: x.t(), "ij"),
    "unsqueeze": (lambda x: x.unsqueeze(1), "ij"),
    "unsqueeze in place": (lambda x: x.clone().unsqueeze_(0), "ij"),
    "squeeze": (lambda x: x.squeeze(1), "ioj"),
    "squeeze first": (lambda x: x.squeeze(0), "ij"),
    "squeeze in place": (lambda x: x.clone().squeeze_(1), "ioj"),
    "transpose in place": (lambda x: x.clone().transpose_(0, 1), "ij"),
    "select": (lambda x: x.select(1, 0), "ijk"),
    "unbind": (lambda x: x.unbind(1), "ijk"),
    "slice": (lambda x: x[:, 1:], "ijk"),
    "slice half": (lambda x: x[: x.shape[0] // 2], "mi"),
    "slice step": (lambda x: x[::2], "mi"),
    "slice from the end": (lambda x: x[-2:], "mi"),
    "chunk": (lambda x: x.chunk(2, 0), "mi"),
    "split": (lambda x: x.split([1, 2], 1), "ii"),
    "split uneven": (lambda x: x.split([1, x.shape[0] - 1], 0), "mi"),
    "cat": (lambda x, y: torch.cat([x, y], 1), "ij,ik"),
    "cat first": (lambda x, y: torch.cat([x, y]), "ij,ij"),
    "cat and chunk": (lambda x, y: torch.cat([x, y]).tanh().chunk(2)[1], "ij,ij"),
    "cat nothing": (lambda x: torch.cat([x, torch.empty(0)], 1), "ij"),
    "stack": (lambda x, y: torch.stack([x, y], 1), "ij,ij"),
    "stack first": (lambda x, y: torch.stack([x, y]), "ij,ij"),
    "unfold": (lambda x: x.unfold(1, 3, 1), "ij"),
    "diagonal": (lambda x: x.diagonal(0, -2, -1), "iij"),
    "view_as_complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j), "ijk"),
    "sum": (lambda x: x.sum(-1), "ijk"),
    "sum all": (lambda x: x.sum(), "ij"),
    "mean, kept": (lambda x: x.mean((1, 2), keepdim=True), "ijk"),
    "var_mean": (lambda x: torch.var_mean(x, 1), "ijk"),
    "max": (lambda x: x.max(1), "ijk"),
    "argmax": (lambda x: x.argmax(-1), "ijk"),
    "softmax": (lambda x: x.softmax(-1), "ijk"),
    "log_softmax": (lambda x: x.log_softmax(1), "ijk"),
    "cumsum": (lambda x: x.cumsum(1), "ijk"),
    "sort": (lambda x: x.sort(1), "ijk"),
    "topk": (lambda x: x.topk(2, 1), "ijk"),
    "norm": (lambda x: x.norm(dim=-1), "ijk"),
    "logsumexp": (lambda x: x.logsumexp((1,)), "ijk"),
    "glu": (lambda x: F.glu(x, 1), "imk"),
    "fft": (lambda x: torch.fft.rfft(x, dim=1).abs(), "ijk"),
    "fft of two": (lambda x: torch.fft.fft2(x).real, "ijk"),
    "fft of all": (lambda x: torch.fft.fftn(x).real, "ijk"),
    "fft and back": (lambda x, w: torch.fft.irfft(torch.fft.rfft(x, dim=1) * w, dim=1), "ilk,k"),
    "fftshift": (lambda x: torch.fft.fftshift(x, 1), "ijk"),
    "stft": (lambda x: torch.stft(x, 4, window=x.new_ones(4), return_complex=True).abs(), "im"),
    "complex": (lambda x, y: (torch.complex(x, y) * torch.complex(y, x).conj()).abs(), "ij,ij"),
    "complex matrices": (lambda x, y: (torch.complex(x, x) @ (y * 1j)).imag, "ij,jk"),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3), "ijk"),
    "local_response_norm, 2d": (lambda x: F.local_response_norm(x, 2), "ijhw"),
    "local_response_norm, 3d": (lambda x: F.local_response_norm(x, 3, 0.1, 0.5), "ijkhw"),
    "roll": (lambda x: x.roll((1, 2), (1, 2)), "ijk"),
    "roll all": (lambda x: x.roll(1), "ij"),
    "flip": (lambda x: x.flip(1), "ijk"),
    "tril": (lambda x: x.tril(), "ijk"),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 0)), "ijk"),
    "pad first": (lambda x: F.pad(x, (0, 0, 1, 0)), "ij"),
    "reflection_pad1d": (lambda x: F.pad(x, (1, 1), mode="reflect"), "ijk"),
    "replication_pad2d": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), "ijhw"),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), "ijk,k,k"),
    "rms_norm": (lambda x, w: F.rms_norm(x, x.shape[-1:], w), "ijk,k"),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), "imhw,m"),
    "batch_norm, learned": (lambda x, m, v: F.batch_norm(x, m, v.abs() + 1), "ijk,j,j"),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), "ijhw,j"),
    "mm": (torch.mm, "ij,jk"),
    "mv": (torch.mv, "ij,j"),
    "bmm": (torch.bmm, "ijk,ikl"),
    "addmm": (torch.addmm, "k,ij,jk"),
    "addmm, all": (torch.addmm, "ik,ij,jk"),
    "baddbmm": (torch.baddbmm, "ijl,ijk,ikl"),
    "matmul": (torch.matmul, "ijkl,lm"),
    "matmul of attention": (lambda q, k: q @ k.mT, "ijkl,ijml"),
    "linear": (F.linear, "ijk,lk,l"),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), "ijk,ilk"),
    "einsum of weights": (lambda x, y: torch.einsum("bij,jk->bik", x, y), "ijk,kl"),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b), "ijhw,kjoo,k"),
    "conv1d": (F.conv1d, "ijh,kjo"),
    "conv_transpose2d": (F.conv_transpose2d, "ijhw,jkoo"),
    "attention": (F.scaled_dot_product_attention, "ijkl,ijml,ijml"),
    "attention, mask": (F.scaled_dot_product_attention, "ijkl,ijml,ijml,km"),
    "attention, own mask": (F.scaled_dot_product_attention, "ijkl,ijml,ijml,iokm"),
    "attention, 3 dimensions": (F.scaled_dot_product_attention, "ikl,iml,iml"),
    "embedding": (lambda w, i: F.embedding(i, w), "jk,il:5"),
    "embedding by frequency": (
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), "jk,il:5"
    ),
    "embedding_bag": (lambda w, i: F.embedding_bag(i, w, mode="mean"), "jk,il:5"),
    "embedding_bag, largest": (lambda w, i: F.embedding_bag(i, w, mode="max"), "jk,il:5"),
    "embedding_bag, weighted": (
        lambda w, i, x: F.embedding_bag(i, w, mode="sum", per_sample_weights=x), "jk,il:5,il"
    ),
    "embedding_bag, weighted alike": (
        lambda w, i, x: F.embedding_bag(i, w, mode="sum", per_sample_weights=x.expand(i.shape)),
        "jk,il:5,l",
    ),
    "embedding_bag by frequency": (
        lambda w, i: F.embedding_bag(i, w, mode="sum", scale_grad_by_freq=True), "jk,il:5"
    ),
    "bags of two samples": (lambda w, i: _bags(w, i, lambda k, n: (0, 2 * n, k)), "jk,il:5"),
    "half bags": (lambda w, i: _bags(w, i, lambda k, n: (0, n, k // 2)), "jk,il:5"),
    "bags across samples": (lambda w, i: _bags(w, i, lambda k, n: (0, n, k), 1), "jk,il:5"),
    "bags that begin later": (lambda w, i: _begun_later(w, i), "jk,il:5"),
    "gather": (lambda x, i: x.gather(1, i), "ijk,ilk:5"),
    "gather some": (lambda x, i: x.gather(1, i[:2]), "ij,ik:5"),
    "scatter": (lambda x, i, y: x.scatter(1, i, y), "ij,ij:1,ij"),
    "scatter_add": (lambda x, i, y: x.scatter_add(1, i, y), "ij,ik:5,ik"),
    "one_hot": (lambda i: F.one_hot(i, 5), "ik:5"),
    "index_select": (lambda x, i: x.index_select(1, i), "ij,k:5"),
    "index_select of shared": (lambda x, i: x.index_select(0, i), "jk,i:5"),
    "index_add": (lambda x, i, y: x.index_add(1, i, y), "ij,k:5,ik"),
    "index": (lambda x, i: x[:, i], "ij,kl:5"),
    "index, table": (lambda x, i: x[i], "jk,il:5"),
    "index, two": (lambda x, a, b: x[:, a, b], "ijm,k:5,k:5"),
    "index, apart": (lambda x, a, b: x[a, :, b], "jim,k:5,k:5"),
    "index, apart of last": (lambda x, a, b: x[:, a, :, b], "ijkm,l:5,l:5"),
    "index by booleans": (lambda x, m: x[m], "ij,i:b"),
    "index by shared booleans": (lambda x, m: x[:, m], "ijk,j:b"),
    "index by shared booleans, two": (lambda x, m: x[m], "ijkl,ij:b"),
    "index by shared and own": (lambda x, m, i: x[m, i], "jik,j:1,k:2"),
    "assign at shared booleans": (lambda x, m, y: _put_at(x, m, y), "ijk,j:b,k"),
    "assign own at shared booleans": (lambda x, m, y: _put_at(x, m, y[:, None]), "ijk,j:b,ik"),
    "assign another's": (lambda x, y: _put_at(x, slice(1), y), "ijk,iok"),
    "index, own": (lambda x, i: x[torch.arange(x.shape[0]), i], "ijk,i:5"),
    "index, own of several": (
        lambda x, i: x[torch.arange(x.shape[0])[:, None], i], "ijk,il:5"
    ),
    "index, own behind": (lambda x, i: x[i, torch.arange(x.shape[1])], "jik,i:5"),
    "index_put, own": (lambda x, i: _put_own(x, i), "ij,i:5"),
    "positions as numbers": (lambda x: x + torch.arange(x.shape[0])[:, None], "ij"),
    "positions of a table": (lambda x, y: y[torch.arange(x.shape[0])], "ij,mk"),
    "a part of what is shared": (lambda x, y: x * y[x.shape[0] : x.shape[0] + 1], "ij,wj"),
    "one of what is shared": (lambda x, y: x * y.select(0, x.shape[0]), "ij,wj"),
    "divided by the batch": (lambda x: x / x.shape[0], "ij"),
    "filled with the batch": (lambda x: torch.full_like(x, x.shape[0]), "ij"),
    "zeros": (lambda x: torch.zeros(x.shape[0], 3) + x[:, :3], "ij"),
    "new_zeros": (lambda x: x.new_zeros(x.shape[0], 3), "ij"),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), "ijhw"),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), "ijhw"),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), "ijhw"),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 1), "ijkhw"),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "ijhw"),
    "interpolate 1": (lambda x: F.interpolate(x, scale_factor=2.0), "ijh"),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), "imhw"),
    "channel_shuffle": (lambda x: torch.channel_shuffle(x, 3), "ilhwk"),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), "ijhw,ihwk"),
    "im2col": (lambda x: F.unfold(x, 2), "ijhw"),
    "nll_loss": (lambda x, t: F.cross_entropy(x, t, reduction="none"), "ij,i:5"),
    "nll_loss, mean": (F.cross_entropy, "ij,i:5"),
    "nll_loss, weights": (
        lambda x, t, w: F.cross_entropy(x, t, w, reduction="none"), "ij,i:5,j"
    ),
    "mse_loss": (lambda x, y: F.mse_loss(x, y, reduction="none"), "ij,ij"),
    "mse_loss, mean": (F.mse_loss, "ij,ij"),
    "bce": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), "ij,ij"
    ),
    "searchsorted": (lambda x, y: torch.searchsorted(x.sort()[0], y.contiguous()), "k,ij"),
    "bucketize": (lambda x, y: torch.bucketize(y.contiguous(), x.sort()[0]), "k,ij"),
    "isin": (torch.isin, "ij,k"),
    "cdist": (torch.cdist, "ijk,ilk"),
    "cdist to shared": (torch.cdist, "ik,lk"),
    "centred": (lambda x: x - x.mean(0), "ij"),
    "prelu": (F.prelu, "ijk,j"),
    "gelu": (F.gelu, "ij"),
    "polar": (lambda x, y: torch.view_as_real(torch.polar(x.abs(), y)), "ij,ij"),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 1)), "ij"),
    "nonzero": (lambda x: x.nonzero(), "ij"),
    "add where": (lambda x, m, y: _added_where(x, m, y), "ijk,ij:b,k"),
    "add where another": (lambda x, m, y: _added_where(x, m, y, m.roll(1, 1)), "ijk,ij:b,k"),
    "add at places": (lambda x, m, y: _added_at(x, m, y), "ik,ji:b,kk"),
    "mean of picked": (lambda x, m, y: _added_at(x, m, y, mean=True), "ik,ji:b,kk"),
    "picked places as numbers": (lambda x, m: x + m.nonzero()[:, 0].sum(), "ij,i:b"),
    "sort and back": (lambda i, x: _sorted_and_back(i, x), "im:6,ik"),
    "sort and back of others": (lambda i, x: _sorted_and_back(i, x, 16), "im:6,ik"),
    "sort away": (lambda x: x[x[:, 0].sort()[1]], "ij"),
    "regroup sorted": (lambda x: x.flatten().sort()[0].view(-1, 5), "ij"),
    "times a count": (lambda i, x: x * _counted(i)[0], "ik:5,im"),
    "grouped": (lambda i, x, w: _grouped(i, x, w), "ik:5,im:f,jmm:f"),
    "grouped by others": (lambda i, x, w: _grouped(i, x, w, i.flip(1) // 2), "ik:5,im:f,jmm:f"),
}  # fmt: skip


def _assigned(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = y
    return x


def _assigned_row(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[0] = y
    return x


def _put_at(x: Tensor, at: Any, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, at] = y
    return x


def _bags(w: Tensor, i: Tensor, bounds: Callable[[int, Any], Any], late: int = 0) -> Tensor:
    starts = torch.arange(*bounds(i.shape[1], i.numel()))
    of = i.flatten().roll(late) if late else i.flatten()
    return F.embedding_bag(of, w, starts, mode="sum")


def _begun_later(w: Tensor, i: Tensor) -> Tensor:
    """Bags from the second entry of a sample to the first one of the next."""
    starts = torch.arange(i.numel()).view(i.shape)[:, 1:2].reshape(-1)
    return F.embedding_bag(i.flatten(), w, starts, mode="sum")


def _put(x: Tensor, mask: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = 0.5
    return x


def _added_where(x: Tensor, mask: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor:
    """Of some entries at `mask`, as of the tokens of one expert."""
    out, flat = x * 2, mask.reshape(-1)
    out[mask if other is None else other] += (x.reshape(-1, x.shape[-1])[flat] * y).tanh()
    return out


def _added_at(x: Tensor, mask: Tensor, w: Tensor, *, mean: bool = False) -> Tensor:
    which, at = torch.where(mask)
    some = x[at] @ w
    some = some - some.mean(0) if mean else some
    return torch.zeros_like(x).index_add_(0, at, some * which[:, None])


def _sorted_and_back(of: Tensor, x: Tensor, several: int | None = None) -> Tensor:
    """Each sample several times, sorted, and back to its place."""
    several = of.shape[1] if several is None else several
    order = of.reshape(-1).sort(stable=True)[1]
    some = x[order // several] * of.reshape(-1)[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return some[back].view(x.shape[0], -1, x.shape[1]).sum(1)


def _counted(of: Tensor) -> Tensor:
    """How many there are of each number."""
    return torch.histc(of.reshape(-1).sort()[0].double(), 5, 0, 4).clone()


def _grouped(of: Tensor, x: Tensor, w: Tensor, counted: Tensor | None = None) -> Tensor:
    """Each sample by matrices that it has chosen."""
    numbers, order = of.reshape(-1).sort()
    numbers = numbers if counted is None else counted.reshape(-1)
    ends = torch.histc(numbers.float(), 5, 0, 4).clone().cumsum(0, dtype=torch.int32)
    some = F.grouped_mm(x[order // of.shape[1]], w, offs=ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return some[back].view(x.shape[0], -1, w.shape[2]).sum(1)


def _put_own(x: Tensor, at: Tensor) -> Tensor:
    x = x.clone()
    x[torch.arange(x.shape[0]), at] = 0.5
    return x


KNOWN = {  # case: the dimensions that may be the samples', each sample with one entry
    "add": "ij", "where": "ij", "copy": "ij", "assign a column": "i", "assign where": "ij",
    "view, flatten": "ik", "view, heads": "ij", "expand": "ij", "repeat": "ij", "permute": "ijk",
    "unsqueeze": "ij", "squeeze": "ij", "select": "ik", "slice": "ik", "cat": "i",
    "cat first": "ij",
    "cat and chunk": "ij", "stack": "ij", "sum": "ij",
    "max": "ik", "argmax": "ij", "var_mean": "ik", "mean, kept": "i", "softmax": "ij",
    "sort": "ik", "layer_norm": "ij", "group_norm": "i", "instance_norm": "i", "mm": "ik",
    "bmm": "ijl", "addmm": "ik", "matmul": "ijkm", "linear": "ij", "einsum": "i", "conv2d": "i",
    "attention": "ij", "attention, mask": "ij", "attention, own mask": "ij", "embedding": "il",
    "gather": "ik", "scatter_add": "i", "one_hot": "ik", "index_select": "i", "index": "ikl",
    "index, own": "i", "index, own of several": "i", "index_put, own": "i", "nll_loss": "i",
    "max_pool2d": "ij", "interpolate": "ij", "grid_sample": "i", "cdist": "i", "zeros": "i",
    "cdist to shared": "i", "searchsorted": "ij", "prelu": "ik", "index, apart": "i",
    "index, apart of last": "i", "add where": "ij", "add at places": "i", "sort and back": "i",
    "grouped": "i", "unsqueeze in place": "ij", "squeeze in place": "ij",
    "fft of two": "i", "fft and back": "i", "stft": "i", "complex": "ij", "complex matrices": "i",
    "local_response_norm": "i", "local_response_norm, 2d": "i",
    "embedding_bag": "i", "embedding_bag, largest": "i", "embedding_bag, weighted": "i",
    "half bags": "i", "index by shared booleans": "ik", "assign at shared booleans": "i",
    "assign own at shared booleans": "i",
}  # fmt: skip
assert KNOWN.keys() <= CASES.keys()


def made(spec: str, sizes: dict[str, Any]) -> list[Tensor]:
    """The tensors of a case."""
    found = []
    for text in spec.split(","):
        letters, _, kind = text.partition(":")
        shape = [sizes[letter] for letter in letters]
        if kind == "b":
            found.append(torch.rand(shape) > 0.5)
        elif kind == "f":
            found.append(torch.randn(shape, dtype=torch.bfloat16))
        elif kind:
            found.append(torch.randint(int(kind), shape))
        else:
            found.append(torch.randn(shape, dtype=torch.float64))
    return found


def labels_of(
    function: Callable[..., Any], spec: str, letter: str, outer: int, each: int
) -> list[Label]:
    """What the rules say of the results, on tensors without memory."""
    # (torch's C++ code may lose a free size, or fail)
    for shapes_of in (nullcontext, python_dispatcher):
        with shapes_of():
            labels = _labels_of(function, spec, letter, outer, each)
        if MEET not in labels:
            return labels
    return [MEET]


def _labels_of(
    function: Callable[..., Any], spec: str, letter: str, outer: int, each: int
) -> list[Label]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    batch = mode.from_tensor(torch.empty(BATCH), symbolic_context=context).shape[0]
    run = Labelling([batch.node.expr])
    with mode, env.suppress_guards():
        tensors = made(spec, {**SIZES, letter: outer * batch * each})
        for tensor, text in zip(tensors, spec.split(",")):
            places = [d for d, one in enumerate(text.partition(":")[0]) if one == letter]
            if places:
                run.set(tensor, Rows(places[0], outer) if len(places) == 1 else MEET)
        run.begin()
        try:
            with run:
                results = function(*tensors)
        except Exception:  # torch cannot say the shapes, so nothing is known
            return [MEET]
        return [run.label(tensor) for _, tensor in tensors_in(results)]


def in_parts(
    tensors: Sequence[Tensor], spec: str, letter: str, outer: int, sizes: list[int]
) -> Any:
    """The tensors of each micro-batch."""
    columns = []
    for tensor, text in zip(tensors, spec.split(",")):
        dim = text.partition(":")[0].find(letter)
        same = [tensor] * len(sizes)
        columns.append(same if dim < 0 else repeated_slices(tensor, dim, outer, sizes))
    return zip(*columns)


def repeated_slices(tensor: Tensor, dim: int, outer: int, sizes: list[int]) -> list[Tensor]:
    """The micro-batches' parts of a dimension that has all samples ``outer`` times."""
    parts = slices(tensor.unflatten(dim, (outer, -1)), Rows(dim + 1), sizes)
    return [part.flatten(dim, dim + 1) for part in parts]


def letters(spec: str) -> list[str]:
    return sorted({one for text in spec.split(",") for one in text.partition(":")[0]})


# of the samples' dimension: what lies outside of the samples, and how many entries each has
@pytest.mark.parametrize(
    ("outer", "each"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.conformance)]
)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_right_and_knows_samples_that_stay_apart(
    name: str, outer: int, each: int
) -> None:
    function, spec = CASES[name]
    torch.manual_seed(0)
    for letter in letters(spec):
        labels = labels_of(function, spec, letter, outer, each)
        known = outer == each == 1 and letter in KNOWN.get(name, "")
        assert not known or MEET not in labels, letter
        if not all(one is None or (isinstance(one, Rows) and one.plain) for one in labels):
            continue  # (what is picked cannot be joined)
        tensors = made(spec, {**SIZES, letter: outer * BATCH * each})
        whole = [tensor for _, tensor in tensors_in(function(*tensors))]
        for sizes in ([2, 2], [3, 1]):
            parts = [
                [tensor for _, tensor in tensors_in(function(*part))]
                for part in in_parts(tensors, spec, letter, outer, sizes)
            ]
            for label, expected, *found in zip(labels, whole, *parts, strict=True):
                check(label, expected, found, f"{name}, {letter}, {outer}, {each}: {label}")


def check(label: Label, whole: Tensor, parts: list[Tensor], what: str) -> None:
    together = parts[0]
    if isinstance(label, Rows):
        apart = [part.unflatten(label.dim, (int(label.outer), -1)) for part in parts]
        rows = Rows(label.dim + 1)
        together = joined(apart, rows).flatten(label.dim, label.dim + 1)
    assert together.shape == whole.shape, what
    exact = 1e-12 if whole.dtype != torch.bfloat16 else 0.05
    assert torch.allclose(together, whole, rtol=exact, atol=exact, equal_nan=True), what


@pytest.mark.parametrize("adds", [False, True])
def test_what_is_added_to_other_numbers_is_no_place(adds: bool) -> None:
    def sorted_and_back(of: Tensor, x: Tensor) -> Tensor:
        order = of.reshape(-1).sort(stable=True)[1]
        places = torch.arange(order.shape[0])
        back = torch.ones_like(order).index_put((order,), places, accumulate=adds)
        return x[order // of.shape[1]][back]

    assert (MEET in labels_of(sorted_and_back, "ik:5,im", "i", 1, 1)) is adds


@pytest.mark.parametrize(
    "function",
    [
        lambda x: _put(x, torch.arange(x.shape[0]).bool()),
        lambda x: x[3 // torch.arange(x.shape[0])],
    ],
    ids=["as a mask", "as a divisor"],
)
def test_places_are_good_to_index_with_and_for_nothing_else(
    function: Callable[[Tensor], Tensor],
) -> None:
    assert labels_of(function, "ij", "i", 1, 1) == [MEET]
