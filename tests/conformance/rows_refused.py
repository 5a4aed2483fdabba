"""What stages cannot do is refused on every rank, in words that help, before any training."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.plugins import MixedPrecision
from rows_networks import BuildsInConfigureModel, TiesAcrossStages
from rows_optimizers import SearchesLines
from rows_steps import PacksWhatIsPadded
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _Refused(Row):
    """Shared by no row: what is refused for the sake of an argument of the strategy."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    control = False  # it has no such argument


class RefusedUnknownCut(_Refused):
    """A cut point that names no module; the nearest names are shown."""

    fast = True
    arguments: ClassVar = {"plan": ["net.secnd"]}
    refused = ("secnd", "'net.second'")


class RefusedRaggedTensors(Row):
    """A jagged `torch.nested` tensor as the network's input."""

    sampled = True
    refused = (
        *("it takes a nested tensor, whose sizes follow from values", "Pad it"),
        "give the network a mask",
    )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        ragged = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        return self.net(ragged).values().square().mean()


class RefusedTooFewCuts(_Refused):
    """Fewer cut points than the number of stages needs."""

    shapes = (ONE_OF_TWO,)  # whose numbers the words have
    arguments: ClassVar = {"plan": []}
    refused = ("stages(2)", "1 cut points")


class RefusedTiedWeightsCompiled(TiesAcrossStages):
    """Weights that are tied across stages, with `compile_stages=True`."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    arguments: ClassVar = {"compile_stages": True}
    refused = ("compile_stages=True", "'first.weight'")
    control = False


class RefusedLineSearchInReplicas(SearchesLines):
    """LBFGS with a line search and several replicas: each would search by its own loss."""

    shapes = (TWO_OF_TWO,)
    refused = ("line_search_fn='strong_wolfe'", "data_parallel_size=1")
    control = False

    def make(self) -> torch.optim.Optimizer:
        # without a search, since `ddp`, which does not refuse it, would wait for ever
        return torch.optim.LBFGS(self.parameters(), max_iter=0, line_search_fn="strong_wolfe")


class RefusedTwoParametersInOneMemory(Row):
    """Weights tied by `a.data = b.data`: tie them by `module.a = module.b`."""

    sampled = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    cuts: ClassVar = {2: ["net.third"]}
    # where both are in one stage they are as on one device
    equal_or_refused = ("'net.second.weight' and 'net.third.weight'", "module.a = module.b")

    def build(self) -> None:
        super().build()
        self.net.third = nn.Linear(8, 8)
        self.net.third.weight = nn.Parameter(self.net.second.weight.detach().clone())

    def on_fit_start(self) -> None:  # to make float64 of the network gives each its own memory
        self.net.third.weight.data = self.net.second.weight.data


class RefusedReentrantCheckpoint(Row):
    """`use_reentrant=True` checkpointing around the only call of the network: use `recompute=True`,
    or checkpoint blocks in `forward`.
    """

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    control = False  # `ddp` finds its parameters ready twice
    refused = ("'net' was called without gradients only", "recompute=True")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = checkpoint(self.net, x.clone().requires_grad_(), use_reentrant=True)
        return nn.functional.cross_entropy(output, y)


class RefusedCheckpointAroundTheCall(Row):
    """Checkpointing around the call of the network (`use_reentrant=False`): use `recompute=True`,
    or checkpoint blocks in `forward`.
    """

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    sampled = True
    refused = ("inside of activation checkpointing", "recompute=True")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = checkpoint(lambda x: self.net(x).tanh(), x, use_reentrant=False)
        return nn.functional.cross_entropy(output, y)


class RefusedCheckpointOfEverything(Row):
    """All of the network is one checkpointed call: use `recompute=True`, or checkpoint blocks."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("all of it is one activation checkpoint", "recompute=True")

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    def build(self) -> None:
        self.net = self.Net()


class RefusedLookAtAnOptimizer(Row):
    """The network reads the learning rate from the optimizer: pass it as an attribute."""

    cuts: ClassVar = {2: ["second"], 3: ["second", "third"]}
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("its forward looks at an optimizer", "the learning rate")

    def build(self) -> None:
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.trainer.optimizers[0].param_groups[0]["lr"]
        return self.third(torch.tanh(self.second(x)) + x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)


class RefusedWritesIntoOneOfTwoViews(Row):
    """The network changes one of two arguments that share memory: pass a `tensor.clone()`."""

    class Net(Layers):
        def forward(self, x: Tensor, same: Tensor) -> Tensor:
            return super().forward(x.mul_(2)) + same.mean(1, keepdim=True)

    sampled = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("changes its argument", "in place", "the same memory", "tensor.clone()")

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x, x.view_as(x)), y)


class RefusedClassThatComputes(Row):
    """Tensors of a class with its own `__torch_function__`, under which TorchDynamo gives other
    numbers.
    """

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("Doubles", "__torch_function__", "as_subclass(torch.Tensor)")

    class Doubles(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = super().__torch_function__(func, types, args, kwargs or {})
            return 2 * result if func is nn.functional.linear else result

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x.as_subclass(self.Doubles)), y)


class RefusedFrozenEncoderThatPacks(Row):
    """Frozen `torch.nn.TransformerEncoder` with padding mask: use `enable_nested_tensor=False`."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    cuts = PacksWhatIsPadded.cuts
    # with automatic sizes it stays on the driver
    equal_or_refused = ("packs padded sequences", "enable_nested_tensor=False")

    def build(self) -> None:
        self.net = PacksWhatIsPadded.Net()
        self.net.embed.requires_grad_(False)
        self.net.encoder.requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.net.encoder.eval()
        return nn.functional.cross_entropy(self.net(x), y)


class RefusedOtherMemoryOfABuffer(Row):
    """`forward` sets `buffer.data = ...`: use `buffer.copy_(...)`."""

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.data = self.scale.data * 0.9
            return super().forward(x * self.scale[:6])

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("`tensor.data = ...`", "tensor.copy_(...)")

    def build(self) -> None:
        self.net = self.Net()


class RefusedSingleLayer(Row):
    """More stages than the network has partitions."""

    sampled = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    cuts: ClassVar = {2: ["net.0"]}
    refused = ("'net'", "has 1 network partition, fewer than pipeline_parallel_size=2", "1 stage,")

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 3))


class RefusedUnknownNetwork(_Refused):
    """`network="name"` that names no module."""

    arguments: ClassVar = {"network": "model"}
    refused = ("'model'", "'net'")


class RefusedWithoutACall(Row):
    """Uses weights (`x @ self.net.first.weight.T`) and never calls a module."""

    fast = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    control = False  # it refuses parameters that get no gradient
    refused = ("RefusedWithoutACall", "as a module")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.net.first.weight.T)
        return nn.functional.cross_entropy(hidden @ self.net.third.weight.T, y)


class RefusedWeightBetweenGraphs(Row):
    """Python that cannot be captured, between graphs, computes with a weight of another rank."""

    sampled = True
    shapes = (ONE_OF_TWO,)  # none of its graphs has three stages
    refused = ("needs the numbers of 'net.second.weight'", "torch.compiler.disable")

    class Net(Layers):
        @torch.compiler.disable
        def scale(self) -> Tensor:
            return self.second.weight.sum()

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x)) * self.scale()
            return self.third(torch.tanh(self.second(x)))

    def build(self) -> None:
        self.net = self.Net()


class RefusedCreateGraph(Row):
    """`create_graph=True` through a network that is cut: use `ddp`."""

    sampled = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("create_graph=True", "ddp")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        [gradient] = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return super().loss(x, y) + gradient.square().mean()


class RefusedBatchedGradients(Row):
    """`is_grads_batched=True` or `jacobian(vectorize=True)` through a network that is cut: use
    `vectorize=False`.
    """

    sampled = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("is_grads_batched=True", "vectorize=False")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        output = self.net(x)
        every = torch.eye(3).to(x)[:, None].expand(3, len(x), 3)
        torch.autograd.grad(output, x, every, is_grads_batched=True)
        return super().loss(x, y)


class RefusedGradientsInOneTensor(Row):
    """Keeps all gradients as parts of one larger tensor."""

    sampled = True
    refused = ("a part of a larger tensor",)

    def on_train_start(self) -> None:
        parameters = list(self.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters)).to(parameters[0])
        sizes = [p.numel() for p in parameters]
        for parameter, part in zip(parameters, self.flat.split(sizes)):
            parameter.grad = part.view_as(parameter)

    def optimizer_zero_grad(self, *_: Any) -> None:
        self.flat.zero_()


class RefusedParametersInOneTensor(Row):
    """Keeps all parameters as parts of one larger tensor (`parameter.data = part`)."""

    sampled = True
    refused = ("shows the memory of parameter", "parameter.data = part.clone()")

    def on_fit_start(self) -> None:
        parameters = list(self.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        sizes = [p.numel() for p in parameters]
        for parameter, part in zip(parameters, self.flat.split(sizes)):
            parameter.data = part.view_as(parameter)


class RefusedClippingByHandInConfigureModel(BuildsInConfigureModel):
    """`clip_grad_norm_` on a network of `configure_model`: a rank has its own gradients alone."""

    sampled = True
    refused = (".weight.grad' is on", "configure_model")

    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class RefusedFusedLossScaling(Row):
    """An optimizer with `fused=True` under `precision="16-mixed"`."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("fused=True", "fused=False")

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        # `precision="16-mixed"` alone becomes bfloat16 on CPUs
        scaler = torch.amp.GradScaler("cpu")
        return {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1, fused=True)


class RefusedSyncBatchNormCompiled(Row):
    """`sync_batchnorm=True` with `compile_stages=True`."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    options: ClassVar = {"sync_batchnorm": True}
    arguments: ClassVar = {"compile_stages": True}
    refused = ("sync_batchnorm=True", "compile_stages=True")
