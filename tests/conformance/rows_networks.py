"""Kinds of networks and ways to build and to call them."""

from contextlib import suppress
from typing import Any, ClassVar

import torch
from suite import ONE_OF_THREE, ONE_OF_TWO, STEPS, TWO_OF_TWO, Layers, Row
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_hybrid import Search

cross_entropy = nn.functional.cross_entropy


class CallsForward(Row):
    """Calls `self.net.forward(x)` instead of `self.net(x)`."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net.forward(x), y)


class ReturnsTuple(Row):
    """The network returns a tuple."""

    sampled = True

    class Net(Layers):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(self.first(x))
            return self.third(torch.tanh(self.second(hidden))), hidden

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, hidden = self.net(x)
        return cross_entropy(logits, y) + 0.1 * hidden.square().mean()


class TakesMetaTensors(Row):
    """Batches are MONAI's MetaTensors.

    They carry the description of a scan along. What the network's Python keeps inside are ordinary
    tensors.
    """

    needs = "monai"

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        from monai.data import MetaTensor  # where the extra `real` is tried it is missing

        x, y = batch
        return [MetaTensor(x, meta={"place": f"batch of {len(x)}"}), y]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.net(x)
        self.seen.append([type(found).__name__, found.meta["place"]])
        return cross_entropy(found, y)


class ReturnsAScalar(Row):
    """The network returns a loss of the whole batch."""

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(super().forward(x), y)

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x, y)


class CallsOnPart(Row):
    """Calls the network on parts of the batch, of two sizes."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        count = 2 + len(self.seen) % 2
        return cross_entropy(self.net(x[:count]), y[:count])


class BuildsInSetup(Row):
    """Builds the network in `setup`."""

    def build(self) -> None:
        pass

    def setup(self, stage: str) -> None:
        self.net = Layers().double()


class BuildsInConfigureModel(Row):
    """Builds the network in `configure_model`: it is whole on no rank."""

    fast = True
    gathered = True

    def build(self) -> None:
        self.net: Layers | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Layers().double()


class ChangesWhatItBuildsBeforeTheFirstCall(BuildsInConfigureModel):
    """Changes weights from `configure_model` by hand before the first step.

    Until the cut the driver has them all.
    """

    def on_fit_start(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)


class HeadStaysOnTheDriver(Row):
    """Calls a network and then a single layer. The layer stays on the driver."""

    cuts: ClassVar = {2: ["encoder.2"]}

    def build(self) -> None:
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.encoder(x)), y)


class TrainsAdversaries(Row):
    """Generator and discriminator, with an optimizer each, toggled by `toggle_optimizer`."""

    sampled = True
    options: ClassVar = {"max_steps": 2 * STEPS}
    cuts: ClassVar = {2: ["generator.2", "discriminator.2"]}
    control = False  # random numbers

    def build(self) -> None:
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        g_optimizer, d_optimizer = self.optimizers()
        noise = torch.randn(len(x), 4, dtype=x.dtype).to(x.device)

        self.toggle_optimizer(g_optimizer)
        loss = nn.functional.softplus(-self.discriminator(self.generator(noise))).mean()
        g_optimizer.zero_grad()
        self.manual_backward(loss)
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)

        self.toggle_optimizer(d_optimizer)
        real = nn.functional.softplus(-self.discriminator(x)).mean()
        fake = nn.functional.softplus(self.discriminator(self.generator(noise).detach())).mean()
        d_optimizer.zero_grad()
        self.manual_backward(real + fake)
        d_optimizer.step()
        self.untoggle_optimizer(d_optimizer)
        self.seen.append([loss.item(), real.item(), fake.item()])

    def configure_optimizers(self) -> Any:
        kind = torch.optim.Adam
        return [kind(m.parameters(), lr=0.01) for m in (self.generator, self.discriminator)]


class BackwardTwice(Row):
    """`retain_graph=True`, and a second backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(*batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        self.seen.append(loss.item())
        optimizer.step()


class MixesUp(Row):
    """Mixup before the network, a smoothed and weighted loss behind it."""

    control = False  # random numbers

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        share = torch.distributions.Beta(0.4, 0.4).sample().item()
        order = torch.randperm(len(x))
        output = self.net(share * x + (1 - share) * x[order])
        weight = torch.tensor([0.2, 0.5, 0.3], dtype=x.dtype)
        criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
        return share * criterion(output, y) + (1 - share) * criterion(output, y[order])


class LearnsLossWeights(Row):
    """Two heads, with learned loss weights outside of the network."""

    sampled = True
    cuts: ClassVar = {2: ["net.heads"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 1)])

        def forward(self, x: Tensor) -> list[Tensor]:
            x = torch.tanh(self.body(x))
            return [head(x) for head in self.heads]

    def build(self) -> None:
        self.net = self.Net()
        self.spread = nn.ParameterDict({n: torch.zeros(()) for n in ("kind", "sum")})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        kind, total = self.net(x)
        losses = {"kind": cross_entropy(kind, y), "sum": (total[:, 0] - x.sum(1)).square().mean()}
        terms = [torch.exp(-s) * losses[name] + s for name, s in self.spread.items()]
        return sum(terms)


class ActivatesInPlace(Row):
    """Activations and additions in place."""

    cuts: ClassVar = {2: ["net.second"]}

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.relu(self.first(x), inplace=True)
            y = self.second(x)
            y += x
            return self.third(y.relu_())

    def build(self) -> None:
        self.net = self.Net()


class SkipsAcrossStages(Row):
    """A small U-Net, with a skip connection from the first stage to the last."""

    fast = True
    cuts: ClassVar = {2: ["net.middle"], 3: ["net.middle", "net.up"]}
    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Conv1d(1, 4, 3, padding=1)
            self.down = nn.Conv1d(4, 8, 2, stride=2)
            self.middle = nn.Conv1d(8, 8, 3, padding=1)
            self.up = nn.ConvTranspose1d(8, 4, 2, stride=2)
            self.leave = nn.Conv1d(8, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            wide = torch.relu(self.enter(x[:, None]))
            low = torch.relu(self.down(wide))
            low = torch.relu(self.middle(low)) + low
            return self.leave(torch.cat([wide, self.up(low)], dim=1)).mean(2)

    def build(self) -> None:
        self.net = self.Net()


class SharesAConstant(Row):
    """Every stage reads a buffer that none changes; the user's code changes it now and then."""

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x) * self.scale)
            x = torch.tanh(self.second(x) * self.scale)
            return self.third(x) * self.scale

    def build(self) -> None:
        self.net = self.Net()

    def on_train_batch_end(self, *_: Any) -> None:
        self.net.scale.mul_(0.9)
        self.seen.append(self.net.scale.item())


class NormsWeights(Row):
    """Weight norm and spectral norm, as parametrizations. Spectral norm changes a buffer in each
    call, so the batch stays whole in training.
    """

    cuts: ClassVar = {2: ["net.2"]}

    def build(self) -> None:
        self.net = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(6, 8)),
            nn.Tanh(),
            parametrizations.spectral_norm(nn.Linear(8, 8)),
            nn.Tanh(),
            parametrizations.weight_norm(nn.Linear(8, 3)),
        )


class NormsWeightsByHooks(Row):
    """The older `torch.nn.utils.weight_norm`, which works by hooks."""

    cuts: ClassVar = {2: ["net.2"]}

    def build(self) -> None:
        old = torch.nn.utils.weight_norm
        self.net = nn.Sequential(old(nn.Linear(6, 8)), nn.Tanh(), old(nn.Linear(8, 3)))


class CountsCalls(Row):
    """Each stage has a buffer that every forward changes. The batch stays whole."""

    shapes = (ONE_OF_TWO, TWO_OF_TWO)
    cuts: ClassVar = {2: ["net.1"]}

    class Counting(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(outputs))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if self.training:
                self.calls += 1
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return torch.tanh(x - self.mean)

    def build(self) -> None:
        self.net = nn.Sequential(self.Counting(6, 8), self.Counting(8, 3))


class KeepsPrototypes(Row):
    """Each step changes a buffer of the LightningModule (codebooks, queues).

    Replicas take those of replica 0 before each step, as under `ddp`.
    """

    def build(self) -> None:
        super().build()
        self.register_buffer("prototype", torch.zeros(3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        outputs = self.net(x)
        self.prototype.lerp_(outputs.detach().mean(0), 0.5)
        return nn.functional.cross_entropy(outputs - self.prototype, y)


class KeepsPrototypesWhileAccumulating(KeepsPrototypes):
    """Changes a buffer in each step while gradients accumulate.

    Replicas exchange buffers after steps that have exchanged gradients, as under `ddp`.
    """

    options: ClassVar = {"accumulate_grad_batches": 2}


class NormalizesOtherwise(Row):
    """Instance, group and layer norm."""

    cuts: ClassVar = {2: ["net.3"]}

    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 6)),
            nn.Conv1d(1, 4, 3),
            nn.InstanceNorm1d(4, affine=True),
            nn.Conv1d(4, 4, 1),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            nn.LayerNorm(16),
            nn.Linear(16, 3),
        )


class ReadsSequences(Row):
    """An embedding, a recurrent layer and an attention."""

    cuts: ClassVar = {2: ["net.attention"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 8)
            self.recurrent = nn.GRU(8, 8, batch_first=True)
            self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            states, _ = self.recurrent(self.embedding(tokens))
            return self.head(self.attention(states)[:, -1])

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(torch.bucketize(x, torch.linspace(-1, 1, 4, dtype=x.dtype)), y)


class ScalesByFrequency(ReadsSequences):
    """`nn.Embedding(scale_grad_by_freq=True)`, whose batch stays whole.

    Samples meet in its backward alone.
    """

    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
    cuts: ClassVar = {2: ["net.attention"], 3: ["net.attention", "net.head"]}

    def build(self) -> None:
        super().build()
        self.net.embedding.scale_grad_by_freq = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class SmallNetworkComesFirst(Row):
    """Calls a single layer before the large network. The layer stays on the driver."""

    cuts: ClassVar = {2: ["net.second"]}

    def build(self) -> None:
        super().build()
        self.stem = nn.Linear(6, 6)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(torch.tanh(self.stem(x)), y)


class _AutomaticSizes(Row):
    """No number of stages is given: as many as one replica has ranks."""

    shapes = (ONE_OF_TWO,)
    control = False  # the same without the strategy's arguments
    arguments: ClassVar = {
        "data_parallel_size": 1,
        "pipeline_parallel_size": "auto",
        "plan": None,
        "search": Search(method="exact"),
    }


class FindsItsSizes(_AutomaticSizes):
    """The number of stages is left open. There are as many as a replica has devices."""


class HasOneLayer(_AutomaticSizes):
    """A network of one layer, with an open number of stages. It stays on the driver."""

    idle = True

    def build(self) -> None:
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self(x), y)


class CatchesAnErrorWithOneLayer(HasOneLayer):
    """The script catches an error of `fit` where nothing could be cut.

    It finds what was trained until then on all ranks.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.trainer.global_step == 3:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)

    def exercise(self, run: Any) -> Any:
        with suppress(ValueError):
            run.trainer().fit(self)
        run.trainers.clear()  # a worker is not told what its failed driver has logged


class TiesAcrossStages(Row):
    """One matrix is used in every stage; gradients are clipped, and it is changed by hand."""

    fast = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
    cuts: ClassVar = {2: ["net.third"], 3: ["net.second", "net.third"]}
    options: ClassVar = {"gradient_clip_val": 0.5}
    trains = False  # its gradient arises in every stage, before all go to the owner

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)
            self.third = nn.Linear(6, 6)
            self.head = nn.Linear(6, 3)
            self.second.weight = self.third.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.second(torch.tanh(self.first(x))))
            return self.head(torch.tanh(self.third(x)))

    def build(self) -> None:
        self.net = self.Net()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.net.third.weight.norm().item())
        if self.trainer.global_step == 3:
            with torch.no_grad():
                self.net.first.weight.mul_(0.5)


class TiesAcrossStagesOfConfigureModel(TiesAcrossStages):
    """Tied weights of a network that is made in `configure_model`.

    The ranks that use it have copies, and the network is whole on none.
    """

    sampled = True
    gathered = True

    def build(self) -> None:
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.Net().double()


class FitsAgainInConfigureModel(TiesAcrossStagesOfConfigureModel):
    """Tied weights that the middle stage does not use, in ``configure_model``, fitted twice.

    The network also has a table of positions and a number as buffers. Another module is fitted
    after it, then a new Trainer fits it again.
    """

    sampled = True

    class Net(TiesAcrossStages.Net):
        def __init__(self) -> None:
            super().__init__()
            self.second.weight = nn.Parameter(torch.empty(6, 6))
            nn.init.xavier_normal_(self.second.weight)
            self.positions = nn.Module()
            self.positions.register_buffer("table", torch.linspace(0, 1, 6), persistent=False)
            self.register_buffer("scale", torch.tensor(6.0).sqrt())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale.to(x.dtype) + self.positions.table)

    def exercise(self, run: Any) -> Any:
        run.trainer().fit(self)
        run.trainer(max_steps=2).fit(type(self)())
        again = run.trainer(max_steps=3)
        again.fit(self)
        return again.global_step


class TiesAcrossStagesAndAccumulates(TiesAcrossStages):
    """One matrix is used in every stage, with `accumulate_grad_batches=2`."""

    options: ClassVar = {"accumulate_grad_batches": 2}


class HooksATiedWeight(TiesAcrossStages):
    """A hook on a tied weight gets the sum of its gradients."""

    def build(self) -> None:
        super().build()
        self.net.first.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class AdaptsFrozenLayers(Row):
    """LoRA under re-entrant activation checkpointing.

    Frozen layers have small trained ones beside them, and a hook makes the output of the first
    layer require gradients.
    """

    fast = True
    cuts: ClassVar = {2: ["net.blocks.1"], 3: ["net.blocks.1", "net.blocks.2"]}
    trains = False  # nor do the stages in front of the first adapter
    idle = True
    control = False  # `ddp` hears twice of a weight in such a region
    shapes = (ONE_OF_TWO, ONE_OF_THREE)

    class Block(nn.Module):
        def __init__(self, *, adapted: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8).requires_grad_(False)
            self.adapter = nn.Linear(8, 8) if adapted else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.layer(x)) + 0.1 * self.adapter(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8).requires_grad_(False)
            adapted = AdaptsFrozenLayers.Block
            self.blocks = nn.ModuleList(adapted(adapted=number > 0) for number in range(3))
            self.head = nn.Linear(8, 3)
            self.first.register_forward_hook(lambda module, inputs, output: output.requires_grad_())

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    def build(self) -> None:
        self.net = self.Net()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, 0.1, momentum=0.9)


class AdaptsFrozenLayersOfConfigureModel(AdaptsFrozenLayers):
    """LoRA of a network that is made in `configure_model`.

    The frozen network is whole on no rank.
    """

    sampled = True
    gathered = True

    def build(self) -> None:
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.Net().double()


class TiesWeights(Row):
    """One matrix in two layers, both in one stage."""

    cuts: ClassVar = {2: ["net.head"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(6, 8)
            self.out = nn.Linear(8, 6)
            self.out.weight = nn.Parameter(self.into.weight.detach().T.clone())
            self.again = nn.Linear(6, 8)
            self.again.weight = self.into.weight
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.out(torch.tanh(self.into(x))))
            return self.head(torch.tanh(self.again(x)))

    def build(self) -> None:
        self.net = self.Net()


class LendsWeights(Row):
    """`torch.func.functional_call` with other weights, after a usual call.

    A step ahead (MAML) and a running mean. Such calls run on the driver.
    """

    sampled = True
    shares = True  # such a call runs on the driver

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        usual = super().loss(x, y)
        return usual + self.lent(x, y)

    def lent(self, x: Tensor, y: Tensor) -> Tensor:
        own = dict(self.net.named_parameters())
        ahead = {name: p - 0.1 * p.detach().sin() for name, p in own.items()}
        mean = {name: p.detach() * 0.9 for name, p in own.items() if "third" not in name}
        with torch.no_grad():
            target = torch.func.functional_call(self.net, mean, (x,)).softmax(1)
        output = torch.func.functional_call(self.net, ahead, (x,))
        return cross_entropy(output, y) + cross_entropy(output, target)


class LendsWeightsAtFirst(LendsWeights):
    """The first call is a `functional_call` on weights that another network makes."""

    def build(self) -> None:
        self.net, self.other = Layers(), nn.ModuleDict({"net": Layers()})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        others = dict(self.other["net"].named_parameters())
        first = cross_entropy(torch.func.functional_call(self.net, others, (x,)), y)
        return first + super().loss(x, y)


class TransformsTheNetwork(Row):
    """`torch.func.jvp`, `vmap` and `jacrev` over the network, and dual numbers.

    They run on the driver.
    """

    sampled = True
    shares = True  # such a call runs on the driver

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        _, slope = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        usual = super().loss(x, y)
        slopes = torch.func.vmap(torch.func.jacrev(self.net))(x)
        with torch.autograd.forward_ad.dual_level():
            dual = self.net(torch.autograd.forward_ad.make_dual(x, x.cos()))
            tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
        return usual + slope.square().mean() + slopes.square().mean() + tangent.square().mean()


class CountsOperations(Row):
    """Calls under `FlopCounterMode`, and under a mode that doubles outputs of layers.

    They run on the driver.
    """

    sampled = True
    shares = True  # such a call runs on the driver

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        usual = super().loss(x, y)
        with FlopCounterMode(display=False) as counted:
            output = self.net(x)
        self.seen.append(counted.get_total_flops())
        with Doubles():
            target = self.net(x).detach().softmax(1)
        return usual + cross_entropy(output, target)


class Doubles(TorchFunctionMode):
    """Every linear layer gives the double."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


class HasASparseBuffer(Row):
    """A constant sparse buffer, the graph of a graph network. Modules that compute with it run on
    the driver.
    """

    sampled = True
    control = False  # `ddp` cannot send sparse buffers
    shapes = (ONE_OF_TWO, ONE_OF_THREE)

    def build(self) -> None:
        super().build()
        graph = torch.eye(16).double() + torch.diag(torch.ones(15), 1).double()
        self.register_buffer("graph", graph.to_sparse(), persistent=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        assert isinstance(self.graph, Tensor)
        near = self.graph.to_dense()[: len(x), : len(x)].to_sparse()
        return super().loss(torch.sparse.mm(near, x), y)


class TruncatesThroughTime(Row):
    """Truncated backpropagation through time: pieces of a sequence one after the other, the last
    one shorter; states come back beside the output.
    """

    sampled = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
    cuts: ClassVar = {2: ["net.second"], 3: ["net.second", "net.out"]}
    shares = True
    captures = 3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            found = []
            for piece in x.unbind(1):
                a = torch.tanh(self.first(piece) + a)
                b = torch.tanh(self.second(a) + b)
                found.append(self.out(b))
            return torch.stack(found, 1), a, b

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        self.net = self.Net()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0][:, None] * torch.linspace(0.5, 1.5, 5).to(batch[0])[:, None]
        a = b = torch.zeros_like(batch[0])
        for piece in x.split(2, 1):
            y, a, b = self.net(piece, a, b)
            loss = y.square().mean() + (a * b).mean()
            self.seen.append(loss.item())
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            a, b = a.detach(), b.detach()
