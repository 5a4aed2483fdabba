"""Operators and transformations within a network: what becomes of them when it is cut."""

from typing import Any, ClassVar

import torch
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)


def deep() -> Any:
    """A first layer that can be cut by itself, into up to three stages."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class _Between(Row):
    """`between` stands behind the first and behind the second layer, so in two stages."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = self.between(torch.tanh(self.first(x)))
            return self.third(self.between(torch.tanh(self.second(x)) + x))

        def between(self, x: Tensor) -> Tensor:
            raise NotImplementedError

    def build(self) -> None:
        self.net = self.Net()


# ---------------------------------------------------------------- arithmetic


class RaisesToPowers(_Between):
    """`**` in all forms: by numbers, of numbers, of tensors, reversed, in place."""

    sampled = True
    shapes = EVERY

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            x = x**2 + 2**x + (x.abs() + 0.5) ** -0.5 + (x + 3) ** x + x**3.0 + pow(x, 2)
            x = x + torch.pow(0.5, x) + torch.pow(x, torch.tensor(2)) + x.square() ** 1
            x = x + torch.float_power(x.abs() + 1, 0.5) + 0.0 ** x.abs().ceil()
            x = 1 + torch.tanh(x / 8)
            x **= 2
            return x.pow_(2).sqrt()


class ReflectsOperators(_Between):
    """Numbers on the left of an operator, floor division, remainders, comparisons as numbers."""

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            size = x.detach().abs() + 1  # `%` and `//` have no derivative on this side
            x = (1 - x) / 2 + 1 / (2 + x) + 5 % size + 3 // size
            x = x + (x > 0) * x - (x <= 0) * 0.5 + (~(x > 1)) + (-x) @ torch.eye(8, dtype=x.dtype)
            x @= torch.eye(8, dtype=x.dtype)
            x += 1
            x /= 3
            return x % 2


class SumsBooleans(_Between):
    """Counts true entries per sample, and combines masks."""

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            positive = x > 0
            share = positive.sum(1, keepdim=True) / positive.shape[1]
            return x * share + (positive & (x < 0.5)).any(1, keepdim=True) * 0.1


class SumsBooleansOfTheBatch(_Between):
    """Counts the true entries of a mask over the whole batch."""

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            return x * (x > 0).sum() / x.numel()


class IndexesByMasks(_Between):
    """Writes values where a mask says, and replaces columns, in place."""

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[x > 0.5] = 0.5
            x[:, 0] = x[:, 1] * 2
            x[:, 2:4] += x[:, 4:6]
            x[..., -1:].mul_(0.5)
            return torch.where(x < -0.5, -0.5, x)


class UsesManyOperators(_Between):
    """`einsum`, an FFT with complex numbers, sorting, `topk`, cumulative sums, scattering."""

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x, dim=1)
            x = x + torch.fft.irfft(spectrum * spectrum.conj(), n=8, dim=1) / 8
            values, indices = x.topk(4, dim=1)
            x = x.scatter_add(1, indices, values).cumsum(1).sort(1).values
            return torch.einsum("bi,bj->bij", x, x.softmax(1)).diagonal(dim1=1, dim2=2)


class ViewsAndCopies(_Between):
    """Strides, `unfold`, `expand`, `as_strided`, and views that are changed in place."""

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            x = x.unsqueeze(1).expand(-1, 3, -1).transpose(1, 2).contiguous()
            flat = x.view(-1, 24)
            flat[:, ::2].neg_()
            windows = x.mean(2).unfold(1, 3, 1)
            return nn.functional.pad(windows.sum(2), (1, 1)) + x.permute(0, 2, 1)[:, 1]


class DependsOnTheOrderInMemory(_Between):
    """Tensors at a cut are permuted, have gaps, or are negated in memory.

    They arrive with their strides.
    """

    sampled = True
    shapes = EVERY

    class Net(_Between.Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            turned = x.unflatten(1, (2, 4)).transpose(1, 2).contiguous().transpose(1, 2)
            half, negated = x[:, ::2], torch.complex(x, 2 * x).conj().imag
            x = self.again(torch.tanh(self.second(x)), turned, half, negated)
            return self.third(self.again(x, turned, half, negated))

        def again(self, x: Tensor, turned: Tensor, half: Tensor, negated: Tensor) -> Tensor:
            rows = turned.as_strided(x.shape, (x.shape[1], 1))
            rows = rows * turned.transpose(1, 2).view(x.shape)
            return x + rows * half.sum(1, keepdim=True) + negated


# ---------------------------------------------------------------- operators of the user's own


@torch.library.custom_op("rows::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x * x * x


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cube_backward(context: Any, gradient: Tensor) -> Tensor:
    [x] = context.saved_tensors
    return gradient * 3 * x * x


cube.register_autograd(_cube_backward, setup_context=_keep)


class HasAnOperator(_Between):
    """An operator of the network's own by `torch.library`, with a gradient."""

    fast = True
    shapes = EVERY

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            return cube(x) + torch.ops.rows.cube(0.5 * x)


@torch.library.custom_op("rows::halve_loudly", mutates_args=())
def halve_loudly(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() / 2)


halve_loudly.register_autograd(lambda context, gradient: gradient / 2)


class HasAnOperatorWithoutShapes(_Between):
    """An operator without a shape function: give it one by `register_fake`."""

    equal_or_refused = ("captured", "halve_loudly")

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            return halve_loudly(x)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, low: float) -> Tensor:
        context.save_for_backward(x)
        context.low = low
        return (x > low).to(x.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        [x] = context.saved_tensors
        return gradient * (x.abs() < 1 + context.low), None


class HasAnAutogradFunction(_Between):
    """A `torch.autograd.Function` (a straight-through estimator)."""

    sampled = True

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            return _StraightThrough.apply(x, 0.1) + x


class _DividesByTheBatch(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / (gradient.norm() + 1e-6)


class MeetsInTheBackward(_Between):
    """A `torch.autograd.Function` whose backward normalises over the batch: samples meet in the
    backward alone, and the batch stays whole.
    """

    equal_or_refused = ("DividesByTheBatch",)
    works = EVERY

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            return _DividesByTheBatch.apply(x)


class StopsGradients(_Between):
    """`detach`, `no_grad`, and rounding with a gradient that passes straight through."""

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                weight = x.softmax(1)
            x = x * weight + x.detach().mean(1, keepdim=True)
            return x + ((4 * x).round() / 4 - x).detach()


class LeavesGradModes(_Between):
    """A region without gradients spans a cut."""

    cuts: ClassVar = {2: ["net.second"], 3: ["net.second", "net.third"]}
    trains = False  # the head alone has gradients

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = super().forward(x)
            return self.head(x)


class HasAutocastInside(_Between):
    """A part of the network runs under `autocast`, another is kept out of it."""

    tolerance = 1e-6
    per_microbatch = True  # a gradient in half precision is rounded once for each

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = torch.tanh(self.first(x.float())).double()
                with torch.autocast("cpu", enabled=False):
                    x = torch.tanh(self.second(x)) + x
            return self.third(x)

    def __init__(self) -> None:
        super().__init__()
        self.net.first.float()  # what is double stays so under autocast


# ---------------------------------------------------------------- transformations


class MapsOverSamples(_Between):
    """`torch.vmap` of a layer, and of a function with a parameter."""

    sampled = True

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.vmap(lambda row: torch.tanh(self.first(row)))(x)
            x = torch.vmap(self.mix, in_dims=(0, None))(x, self.second.weight)
            return self.third(x)

        def mix(self, row: Tensor, weight: Tensor) -> Tensor:
            return torch.tanh(weight @ row + self.second.bias) + row

    def build(self) -> None:
        self.net = self.Net()


class CallsFunctionally(_Between):
    """`torch.func.functional_call` within the network: the weights of a layer are made by another
    layer.
    """

    trains = False  # a gradient of what is made goes to what makes it

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            made = {name: torch.tanh(p) * 2 for name, p in self.second.named_parameters()}
            x = torch.tanh(torch.func.functional_call(self.second, made, (x,))) + x
            return self.third(x)

    def build(self) -> None:
        self.net = self.Net()


class HasAnEnsemble(_Between):
    """Stacked weights of three members, run by `vmap` over `functional_call`."""

    cuts: ClassVar = {2: ["net.head"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 6) / 3)
            self.bias = nn.Parameter(torch.zeros(3, 8))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            def member(weight: Tensor, bias: Tensor) -> Tensor:
                return torch.tanh(nn.functional.linear(x, weight, bias))

            return self.head(torch.vmap(member)(self.weight, self.bias).mean(0))


class DifferentiatesInside(_Between):
    """`torch.func.grad` and `jacrev` with respect to the inputs, within the network."""

    equal_or_refused = ("rows_operators.py",)
    works = EVERY

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            energy = torch.func.grad(lambda t: torch.tanh(self.first(t)).square().sum())
            x = torch.tanh(self.first(x + 0.1 * energy(x)))
            return self.third(torch.tanh(self.second(x)))

    def build(self) -> None:
        self.net = self.Net()


class AsksAutogradInside(_Between):
    """`torch.autograd.grad(..., create_graph=True)` within `forward`, as for forces."""

    equal_or_refused = ("autograd.grad",)

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            energy = super().forward(x).square().sum(1)
            [force] = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return self.third(torch.tanh(self.second(torch.tanh(self.first(force)))))

    def build(self) -> None:
        self.net = self.Net()


class DifferentiatesForward(_Between):
    """Forward-mode derivatives by `torch.autograd.forward_ad`, within the network."""

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, torch.ones_like(x))
                tangent = forward_ad.unpack_dual(torch.sin(dual)).tangent
            return x + 0.1 * tangent


# ---------------------------------------------------------------- checkpointing


class CheckpointsItsBlocks(_Between):
    """Activation checkpointing of blocks, also in the older reentrant way."""

    # `ddp` takes no reentrant ones beside unused parameters
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    control = False
    cuts: ClassVar = {2: ["net.blocks.4"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 8)
            blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)]
            self.blocks = nn.Sequential(*blocks)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = checkpoint(self.blocks[0], x, use_reentrant=False)
            x = checkpoint(self.blocks[1], x, use_reentrant=True)
            x = checkpoint(self.blocks[2:4], x, use_reentrant=False)
            return self.head(self.blocks[4](x))


class CheckpointsDropout(_Between):
    """Dropout within checkpointed blocks: the second run draws what the first has drawn."""

    per_microbatch = True
    control = False
    cuts: ClassVar = {2: ["net.blocks.1"]}

    class Net(CheckpointsItsBlocks.Net):
        def __init__(self) -> None:
            super().__init__()
            blocks = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh()) for _ in range(3))
            self.blocks = nn.Sequential(*blocks)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)


# ---------------------------------------------------------------- random numbers


class HasDistributions(_Between):
    """Log-probabilities, entropies and divergences of `torch.distributions`; nothing is drawn."""

    equal_or_refused = ("kl_divergence", "fewer than 3 stages")  # the parts between
    works = (ONE_OF_TWO, TWO_OF_TWO)

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            normal = torch.distributions.Normal(x, nn.functional.softplus(x) + 0.1)
            other = torch.distributions.Normal(0.0, 1.0)
            divergence = torch.distributions.kl_divergence(normal, other)
            kinds = torch.distributions.Categorical(logits=x)
            return normal.log_prob(x + 0.3) - 0.1 * divergence + kinds.entropy()[:, None]


class DrawsFromDistributions(_Between):
    """`rsample` of normal and relaxed categorical distributions, as in variational autoencoders."""

    per_microbatch = True
    control = False
    shapes = EVERY

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            normal = torch.distributions.Normal(x, nn.functional.softplus(x) + 0.1)
            x = torch.tanh(normal.rsample())
            return x + nn.functional.gumbel_softmax(x, tau=0.7, dim=1)


class DrawsInManyWays(_Between):
    """`rand_like`, `randn_like`, `bernoulli`, `randint_like`, `normal_`, and dropout of
    channels.
    """

    per_microbatch = True
    control = False

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            x = x * torch.rand_like(x[:, :1]) + 0.1 * torch.randn_like(x)
            x = x * torch.bernoulli(torch.full_like(x, 0.8))
            x = x + torch.empty_like(x).normal_(0, 0.1)
            x = x + 0.01 * torch.randint_like(x, 0, 3)
            return nn.functional.dropout1d(x[:, :, None], 0.2)[:, :, 0]


class DrawsFromItsOwnGenerator(_Between):
    """A `torch.Generator` of the network's own goes on from call to call."""

    equal_or_refused = ("generator",)

    class Net(_Between.Net):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def between(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


class SeedsInForward(_Between):
    """`torch.manual_seed` within `forward`: the same noise for every batch. That runs on the
    driver, and what comes before it is cut.
    """

    cuts: ClassVar = {2: ["net.first.2"], 3: ["net.first.2", "net.first.4"]}
    control = False

    class Net(_Between.Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = deep()

        def between(self, x: Tensor) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                return x + 0.1 * torch.randn(8, dtype=x.dtype)


# ---------------------------------------------------------------- what depends on values


class TakesANumberOut(_Between):
    """`.item()`: a scale of the whole batch, as a number."""

    sampled = True
    equal_or_refused = ("item()",)
    works = EVERY

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            return x / (1 + x.detach().abs().max().item())


class BranchesOnAValue(_Between):
    """An `if` on a sum of values."""

    equal_or_refused = ("rows_operators.py",)

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                return 2 * x
            return x.abs()


class LoopsUntilItConverges(_Between):
    """A fixed point iteration, whose length depends on values."""

    equal_or_refused = ("rows_operators.py",)

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            for _ in range(20):
                new = 0.3 * torch.tanh(x) + 0.1
                if (new - x).abs().max() < 1e-3:
                    break
                x = new
            return x


class FindsNonzero(_Between):
    """A layer takes only the rows that `nonzero` finds. The batch stays whole."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            chosen = (x[:, 0] > 0).nonzero()[:, 0]
            x = x.index_add(0, chosen, torch.tanh(self.second(x[chosen])))
            return self.third(x)

    def build(self) -> None:
        self.net = self.Net()


class ChoosesByAMask(_Between):
    """`x[mask]` picks as many rows as the mask has true entries."""

    equal_or_refused = ("rows_operators.py",)
    works = EVERY

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            chosen = x[:, 0] > 0
            result = torch.zeros_like(x)
            result[chosen] = 2 * x[chosen]
            return result + x


class FindsUnique(_Between):
    """Each distinct token is embedded once, by `unique`. The batch stays whole."""

    cuts: ClassVar = {2: ["net.third"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(9, 8)
            self.second = nn.Linear(8, 8)
            self.third = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            tokens = (x[:, 0] * 2).round().long().clamp(-4, 4) + 4
            distinct, where = torch.unique(tokens, return_inverse=True)
            x = self.second(torch.tanh(self.first(distinct)))[where]
            return self.third(torch.tanh(x))


class PacksSequences(_Between):
    """`pack_padded_sequence` around an LSTM; the lengths are a tensor beside the batch."""

    sampled = True
    equal_or_refused = ("pack",)
    cuts: ClassVar = {2: ["net.head"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(2, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            states, _ = pad_packed_sequence(self.first(packed)[0], batch_first=True)
            return self.head(states.sum(1))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        lengths = 1 + (torch.arange(len(x)) + len(self.seen)) % 3
        return cross_entropy(self.net(x.view(len(x), 3, 2), lengths), y)


class LeavesTorch(_Between):
    """NumPy in the middle of a network, without a gradient."""

    equal_or_refused = ("numpy",)
    works = EVERY

    class Net(_Between.Net):
        def between(self, x: Tensor) -> Tensor:
            ranks = x.detach().cpu().numpy().argsort(axis=1)
            return x + 0.1 * torch.from_numpy(ranks).to(x)


class CatchesErrors(_Between):
    """`try` and `with` around layers."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            try:
                x = torch.tanh(self.first(x))
                x = x + self.missing  # type: ignore[operator]
            except AttributeError:
                x = torch.tanh(self.second(x)) + x
            return self.third(x)

    def build(self) -> None:
        self.net = self.Net()


class HasAScriptedPart(_Between):
    """One layer was compiled by TorchScript."""

    sampled = True
    equal_or_refused = ("TorchScript",)

    def build(self) -> None:
        self.net = Layers()

        class Gate(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(x) * torch.sigmoid(x)

        self.net.first = nn.Sequential(nn.Linear(6, 8), torch.jit.script(Gate()))  # type: ignore


class HasAnLSTM(_Between):
    """An LSTM of two layers in both directions; the state of the last step is used."""

    sampled = True
    cuts: ClassVar = {2: ["net.second"], 3: ["net.second", "net.head"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(2, 4, num_layers=2, bidirectional=True, batch_first=True)
            self.second = nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            states, _ = self.first(x.view(-1, 3, 2))
            _, (hidden, _) = self.second(states)
            return self.head(hidden[-1])


class UnrollsACell(_Between):
    """A recurrent cell in a Python loop over time. Its state is made in `forward`."""

    cuts: ClassVar = {2: ["net.head"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTMCell(2, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = cell = x.new_zeros(x.shape[0], 8)
            for step in x.view(-1, 3, 2).unbind(1):
                hidden, cell = self.first(step, (hidden, cell))
            return self.head(hidden)
