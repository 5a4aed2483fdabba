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
    fast = True
    arguments: ClassVar = {"allocation": ["net.secnd"]}
    refused = ("secnd", "'net.second'")


class RefusedRaggedTensors(Row):
    """An input in which samples have several lengths, as one tensor."""

    fast = True
    refused = ("it takes a nested tensor, whose sizes follow from values",)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        ragged = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        return self.net(ragged).values().square().mean()


class RefusedTooFewCuts(_Refused):
    shapes = (ONE_OF_TWO,)  # whose numbers the words have
    arguments: ClassVar = {"allocation": []}
    refused = ("stages(2)", "1 cut points")


class RefusedTiedWeightsCompiled(TiesAcrossStages):
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    arguments: ClassVar = {"compile_stages": True}
    refused = ("compile_stages=True", "'first.weight'")
    control = False


class RefusedTiedWeightsInConfigureModel(TiesAcrossStages):
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("'net.first.weight'", "configure_model", "__init__")
    gathered = True

    def build(self) -> None:
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.Net().double()


class RefusedLineSearchInReplicas(SearchesLines):
    shapes = (TWO_OF_TWO,)
    refused = ("line_search_fn='strong_wolfe'", "data_parallel_size=1")
    control = False

    def make(self) -> torch.optim.Optimizer:
        # without a search, since `ddp`, which does not refuse it, would wait for ever
        return torch.optim.LBFGS(self.parameters(), max_iter=0, line_search_fn="strong_wolfe")


class RefusedTwoParametersInOneMemory(Row):
    """Tied as users tie that do not know that two layers may have one parameter."""

    fast = True
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
    """This kind of activation checkpointing calls the network without gradients first."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    control = False  # `ddp` finds its parameters ready twice
    refused = ("'net' was called without gradients only", "use_reentrant=False")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = checkpoint(self.net, x.clone().requires_grad_(), use_reentrant=True)
        return nn.functional.cross_entropy(output, y)


class RefusedWritesIntoOneOfTwoViews(Row):
    """Both arguments of the network show the batch; on one device the second would follow."""

    class Net(Layers):
        def forward(self, x: Tensor, same: Tensor) -> Tensor:
            return super().forward(x.mul_(2)) + same.mean(1, keepdim=True)

    fast = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("changes its argument", "in place", "the same memory", "tensor.clone()")

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x, x.view_as(x)), y)


class RefusedClassThatComputes(Row):
    """A class of tensors that takes part in each operation: TorchDynamo gives other numbers."""

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
    """Inside of what is to be cut: its calls in training are like those of an evaluation."""

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
    fast = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    cuts: ClassVar = {2: ["net.0"]}
    refused = ("'net'", "has 1 network partition, fewer than pipeline_parallel_size=2", "1 stage,")

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 3))


class RefusedUnknownNetwork(_Refused):
    arguments: ClassVar = {"network": "model"}
    refused = ("'model'", "'net'")


class RefusedWithoutACall(Row):
    fast = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    control = False  # it refuses parameters that get no gradient
    refused = ("RefusedWithoutACall", "as a module")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.net.first.weight.T)
        return nn.functional.cross_entropy(hidden @ self.net.third.weight.T, y)


class RefusedWeightBetweenGraphs(Row):
    """Python that cannot be captured reads a weight that a worker owns."""

    fast = True
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
    fast = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("create_graph=True", "ddp")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        [gradient] = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return super().loss(x, y) + gradient.square().mean()


class RefusedBatchedGradients(Row):
    """A jacobian in one backward: many gradients at once in the place of one."""

    fast = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("is_grads_batched=True", "vectorize=False")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        output = self.net(x)
        every = torch.eye(3, dtype=x.dtype)[:, None].expand(3, len(x), 3)
        torch.autograd.grad(output, x, every, is_grads_batched=True)
        return super().loss(x, y)


class RefusedGradientsInOneTensor(Row):
    """One buffer for all gradients, of which each has its part."""

    fast = True
    refused = ("a part of a larger tensor",)

    def on_train_start(self) -> None:
        parameters = list(self.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        sizes = [p.numel() for p in parameters]
        for parameter, part in zip(parameters, self.flat.split(sizes)):
            parameter.grad = part.view_as(parameter)

    def optimizer_zero_grad(self, *_: Any) -> None:
        self.flat.zero_()


class RefusedParametersInOneTensor(Row):
    fast = True
    refused = ("shows the memory of", "parameter.data = part.clone()")

    def on_fit_start(self) -> None:
        parameters = list(self.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        sizes = [p.numel() for p in parameters]
        for parameter, part in zip(parameters, self.flat.split(sizes)):
            parameter.data = part.view_as(parameter)


class RefusedClippingByHandInConfigureModel(BuildsInConfigureModel):
    """By a norm of all gradients, of which this rank has its own alone."""

    fast = True
    refused = ("The gradient of", "configure_model")

    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class RefusedFusedLossScaling(Row):
    """A fused optimizer takes the loss scale into its step."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    refused = ("fused=True", "fused=False")

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        # `precision="16-mixed"` alone becomes bfloat16 on CPUs
        scaler = torch.amp.GradScaler("cpu")
        return {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1, fused=True)


class RefusedSyncBatchNormCompiled(Row):
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    options: ClassVar = {"sync_batchnorm": True}
    arguments: ClassVar = {"compile_stages": True}
    refused = ("sync_batchnorm=True", "compile_stages=True")
