"""Weights, gradients and settings that users read and change by hand while a run lasts."""

import copy
import io
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from rows_networks import BuildsInConfigureModel, KeepsPrototypes
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row
from torch import Tensor, nn
from torch.utils.data import DataLoader

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)


class _Manual(Row):
    """Manual optimisation; `update` is what follows the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(*batch)
        self.seen.append(loss.item())
        self.manual_backward(loss)
        self.update(self.optimizers())

    def update(self, optimizer: Any) -> None:
        raise NotImplementedError


class KeepsViewsOfWeights(Row):
    """Takes `p.data`, `p.detach()` and a `state_dict()` early, and changes them in mid-run."""

    fast = True
    shapes = EVERY

    def on_fit_start(self) -> None:
        self.data = [p.data for p in self.parameters()]
        self.state = self.state_dict()
        self.row = self.net.first.weight.detach()[0]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            self.data[0].mul_(0.5)
            self.state["net.third.weight"].add_(0.1)
            self.row.zero_()
        self.seen.append([float(value.sum()) for value in (*self.data, self.row)])
        self.seen.append({name: value.clone() for name, value in self.state.items()})


class ClearsGradientsOfTheModule(_Manual):
    """Calls `module.zero_grad()` instead of the optimizer's, under manual optimization."""

    sampled = True
    shapes = EVERY

    def update(self, optimizer: Any) -> None:
        optimizer.step()
        self.zero_grad()


class ClearsGradientsOfWhatItBuilds(ClearsGradientsOfTheModule, BuildsInConfigureModel):
    """`zero_grad()` of a module from `configure_model`. No rank has all of it."""

    fast = False


class KeepsPrototypesByHand(ClearsGradientsOfTheModule, KeepsPrototypes):
    """Changes a buffer in each step of manual optimization; as under `ddp`, replicas exchange
    buffers before the first step alone.
    """


class FreezesBetweenForwardAndBackward(_Manual):
    """Freezes and thaws layers between forward and backward.

    It does so with two calls of the network open, too. Gradients go to what is trainable when the
    backward comes.
    """

    sampled = True
    shapes = EVERY

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(*batch)
        again = self.loss(*batch)
        for layer in (self.net.first, self.net.third):
            layer.requires_grad_(False)
        self.manual_backward(loss)
        self.seen.append([p.grad is None for p in self.parameters()])
        third = self.loss(*batch)  # in which these layers are frozen
        for layer in (self.net.first, self.net.third):
            layer.requires_grad_(True)
        self.manual_backward(third)
        if batch_idx % 2:
            self.manual_backward(again)
        self.seen.append([p.grad is None for p in self.parameters()])
        self.update(self.optimizers())

    def update(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()


class FreezesWithASplitBackward(FreezesBetweenForwardAndBackward):
    """Freezes layers before a split backward (`schedule="zero_bubble"`)

    It computes gradients of weights later.
    """

    arguments: ClassVar = {"schedule": "zero_bubble"}
    cuts: ClassVar = {2: ["net.second"]}


class SetsGradientsToNone(_Manual):
    """Sets `p.grad = None` for every parameter after the step."""

    def update(self, optimizer: Any) -> None:
        self.net.first.bias.grad = None  # not trained
        optimizer.step()
        for parameter in self.parameters():
            parameter.grad = None


class ClearsGradientsInPlace(_Manual):
    """Calls `p.grad.zero_()` for every parameter after the step."""

    def update(self, optimizer: Any) -> None:
        optimizer.step()
        for parameter in self.parameters():
            parameter.grad.zero_()


class ClipsByHand(_Manual):
    """Calls `clip_grad_norm_` and `clip_grad_value_` before the step, under manual optimization."""

    fast = True

    def update(self, optimizer: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.seen.append(norm.item())
        nn.utils.clip_grad_value_(self.net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


class ScalesGradients(_Manual):
    """Replaces every gradient by half of it before the step."""

    def update(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()


class LooksAtGradients(Row):
    """Logs the norm of every gradient around the step."""

    options: ClassVar = {"gradient_clip_val": 0.1}

    def on_after_backward(self) -> None:
        self.note("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("before")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("end")

    def note(self, when: str) -> None:
        norms = [p.grad.norm().item() for p in self.parameters() if p.grad is not None]
        self.seen.append((when, norms))


class PenalisesWeights(Row):
    """An L2 penalty over all of `self.parameters()`."""

    shapes = EVERY
    trains = False  # gradients of the penalty arise on the driver, before they go to their owner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().loss(x, y) + 0.01 * penalty


class PenalisesWeightsWhileAccumulating(PenalisesWeights):
    """An L2 penalty, with `accumulate_grad_batches=2`."""

    shapes = (ONE_OF_TWO, TWO_OF_TWO)
    options: ClassVar = {"accumulate_grad_batches": 2}


class PenalisesOneLayer(Row):
    """Adds a penalty on one layer's weights to the loss.

    It looks at the gradient that network and penalty give together.
    """

    trains = False

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + 0.1 * self.net.first.weight.abs().sum()

    def on_after_backward(self) -> None:
        self.seen.append(self.net.first.weight.grad.flatten().tolist())


class BoundsWeights(Row):
    """Clamps weights in place after each step (Wasserstein GAN)."""

    shapes = EVERY

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


class ChangesData(Row):
    """Changes `weight.data` in place and replaces it, before each batch."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.net.first.weight.data[0] *= 0.5
        self.net.second.weight.data = self.net.second.weight.data.neg()


class ReadsWeights(Row):
    """Reads the weights in every step: by `state_dict()`, `copy.deepcopy` and `torch.save`."""

    sampled = True

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([p.sum().item() for p in self.parameters()])
        self.seen.append(sum(t.sum() for t in self.net.state_dict().values()).item())
        copied = copy.deepcopy(self.net)
        self.seen.append(copied.first.weight.norm().item())
        file = io.BytesIO()
        torch.save(self.state_dict(), file)
        file.seek(0)
        self.seen.append(torch.load(file)["net.first.bias"].tolist())


class GoesBackToBestWeights(Row):
    """Copies the weights, and loads them again in mid-run."""

    def on_train_batch_end(self, output: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            self.kept = {name: t.clone() for name, t in self.net.state_dict().items()}
        if self.trainer.global_step == 4:
            self.net.load_state_dict(self.kept)


class _Average(Callback):
    """An exponential average by hand; the validation uses it."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average = [p.detach().clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for mean, parameter in zip(self.average, module.parameters()):
            mean.lerp_(parameter.detach(), 0.25)

    def swap(self, module: Any) -> None:
        for mean, parameter in zip(self.average, module.parameters()):
            kept = parameter.data.clone()
            parameter.data.copy_(mean)
            mean.copy_(kept)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.swap(module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.swap(module)


class AveragesByHand(Row):
    """A callback keeps an exponential average of weights, for validation.

    It exchanges the weights for it.
    """

    def trainer_options(self, folder: Any) -> dict[str, Any]:
        return {
            "callbacks": [_Average()],
            "num_sanity_val_steps": 0,
            "val_check_interval": 2,
            "check_val_every_n_epoch": None,
        }

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(*batch).item())


class LooksAtOptimizerState(Row):
    """Saves, changes and loads the optimizer's `state_dict()` in mid-run."""

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.optimizers().optimizer
        state = optimizer.state_dict()
        self.seen.append([s["momentum_buffer"].sum().item() for s in state["state"].values()])
        if self.trainer.global_step == 3:
            for part in state["state"].values():
                part["momentum_buffer"] = torch.zeros_like(part["momentum_buffer"])
            optimizer.load_state_dict(state)


class AddsGroups(Row):
    """Unfreezes a layer in mid-epoch, as a new parameter group."""

    sampled = True
    shapes = EVERY
    options: ClassVar = {"gradient_clip_val": 0.1}
    idle = True

    def configure_optimizers(self) -> Any:
        rest = [*self.net.second.parameters(), *self.net.third.parameters()]
        return torch.optim.SGD(rest, lr=0.1, momentum=0.9)

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 2:
            group = {"params": list(self.net.first.parameters()), "lr": 0.02}
            self.optimizers().optimizer.add_param_group(group)


class ChangesSettings(Row):
    """Changes attributes of layers in mid-run.

    A slope, a switch, and a number that the network's own code uses.
    """

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.activation = nn.LeakyReLU(0.1)
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            x = self.activation(self.first(x)) * self.scale
            return self.third(torch.tanh(self.second(x)) + x)

    def build(self) -> None:
        self.net = self.Net()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        self.net.activation.negative_slope = 0.1 * (step + 1)
        self.net.scale = 1.0 if step < 3 else 0.5


class ResetsStatistics(Row):
    """Replaces buffers and momentum of a batch normalisation in mid-run."""

    shares = True

    per_microbatch = True

    class Net(Layers):
        by_value = False

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))  # type: ignore[assignment]
            self.third = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            if self.by_value and x.sum() > 100:  # then it cannot be captured
                return -super().forward(x)
            return super().forward(x)

    def build(self) -> None:
        self.net = self.Net()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        norms = self.net.first[1], self.net.third[0]
        if self.trainer.global_step == 2:
            for norm in norms:
                self.reset(norm)
        if self.trainer.world_size == 1:  # with more, each has its own
            self.seen.append([norm.running_mean.tolist() for norm in norms])

    def reset(self, norm: nn.BatchNorm1d) -> None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        norm.running_mean = torch.zeros_like(norm.running_mean)
        norm.running_var = torch.ones_like(norm.running_var)
        norm.num_batches_tracked *= 0
        norm.momentum = None


class ResetsStatisticsOfWhatRunsHere(ResetsStatistics):
    """Replaces buffers of a batch normalisation of a network that cannot be captured any more.

    The network runs on the driver.
    """

    def reset(self, norm: nn.BatchNorm1d) -> None:
        super().reset(norm)
        self.net.by_value = True
        self.parts = 1  # from here on


class StartsAgain(Row):
    """Gives a layer new random weights in mid-run."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == 3:
            torch.manual_seed(11)  # the state before is not the same in every strategy
            nn.init.normal_(self.net.first.weight, std=0.3)
            self.net.second.reset_parameters()


class CallsAPartOfTheNetwork(Row):
    """Calls a layer of an earlier stage by itself. It runs on the driver, on weights that are
    fetched, and they are trained.
    """

    sampled = True
    shares = True

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.net.first(x).square().mean()


class WeighsLossesByTheirGradients(Row):
    """Weighs losses by `torch.autograd.grad(loss, weight)`, as VQGAN does.

    It has two losses, and one weight of each stage. Each such call runs a backward through all
    stages.
    """

    sampled = True
    shapes = EVERY

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.net(x)
        one, two = nn.functional.cross_entropy(output, y), output.square().mean()
        for layer in (self.net.first, self.net.third):
            by_one, by_two = (
                torch.autograd.grad(loss, layer.weight, retain_graph=True)[0] for loss in (one, two)
            )
            two = two * by_one.norm() / (by_two.norm() + 1)
        return one + two


class WeighsLossesWhileAccumulating(WeighsLossesByTheirGradients):
    """Weighs losses by their gradients while gradients accumulate.

    It calls `torch.autograd.grad(loss, weight)`. These are neither in the result nor lost.
    """

    options: ClassVar = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


class ChoosesWhatGetsGradients(_Manual):
    """`backward(inputs=weights)`, and gradients combined by hand (PCGrad)."""

    sampled = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)  # `ddp` averages nothing of `autograd.grad`

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self.net(x)
        one, two = nn.functional.cross_entropy(output, y), output.square().mean()
        weights = [p for p in self.net.parameters() if p.dim() == 2]
        (0.5 * one).backward(inputs=weights[::2], retain_graph=True)
        everything = list(self.net.parameters())
        found = torch.autograd.grad(two, everything, retain_graph=True)
        self.seen.append([g.norm().item() for g in found])
        self.seen.append([p.grad is None for p in everything])
        (0.1 * one).backward(inputs=[*weights, output], retain_graph=True)
        self.manual_backward(0.2 * one)
        for parameter, gradient in zip(everything, found):
            parameter.grad = parameter.grad + gradient
        self.optimizers().step()
        self.optimizers().zero_grad()


class GrowsItsLastLayer(Row):
    """Adds a class to the last layer in mid-fit, with a new optimizer."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    control = False  # `ddp` refuses parameters that it does not know

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 3:
            last = self.net.third
            row, one = last.weight.new_zeros(1, 8), last.bias.new_zeros(1)
            last.weight = nn.Parameter(torch.cat([last.weight.detach(), row]))
            last.bias = nn.Parameter(torch.cat([last.bias.detach(), one]))
            last.out_features = 4
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


class _Evaluates(Row):
    """What an evaluation changes stays, on all ranks."""

    shapes = EVERY
    trains = False
    idle = True

    def test_dataloader(self) -> Any:
        return DataLoader(self.dataset(), batch_size=4)

    predict_dataloader = test_dataloader


class AdaptsStatisticsInPredict(_Evaluates):
    """`predict` in training mode, so that batch statistics follow the data.

    They stay on all ranks.
    """

    microbatches = 1

    def build(self) -> None:
        super().build()
        self.net.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))

    def on_predict_epoch_start(self) -> None:
        self.net.train()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def exercise(self, run: Any) -> Any:
        run.trainer().predict(self)
        return {name: value.clone() for name, value in self.state_dict().items()}


class CountsInPredict(_Evaluates):
    """Counts in buffers during `predict`, in inference mode.

    They are in the first and in the last stage. The counts stay on all ranks. (With several
    replicas all have those of the first one.)
    """

    # of several replicas, afterwards all have the buffers of the first; under `ddp` each its own
    shapes = (ONE_OF_TWO, ONE_OF_THREE)

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("results", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = super().forward(x)
            self.results += y.detach().abs().max()
            return y

    def build(self) -> None:
        self.net = self.Net()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def exercise(self, run: Any) -> Any:
        run.trainer().predict(self)
        run.trainer().fit(self)
        return {name: value.clone() for name, value in self.state_dict().items()}


class ChangesWeightsInAnEvaluation(_Evaluates):
    """Changes weights in place during an evaluation. They stay on all ranks as they are then."""

    sampled = True

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(*batch), sync_dist=True)
        for parameter in self.net.third.parameters():
            parameter.mul_(0.5)

    def exercise(self, run: Any) -> Any:
        found = run.trainer().test(self, verbose=False)
        return found, {name: value.clone() for name, value in self.state_dict().items()}


class TrainsAtTestTime(_Evaluates):
    """Trains the network in `test_step`, with `inference_mode=False`."""

    sampled = True
    options: ClassVar = {"inference_mode": False}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            self.loss(*batch).backward()
        torch.optim.SGD(self.net.parameters(), lr=0.1).step()
        self.zero_grad()

    def exercise(self, run: Any) -> Any:
        run.trainer().test(self, verbose=False)
        return {name: value.clone() for name, value in self.state_dict().items()}


class LooksAtGradientsAfterwards(Row):
    """The script reads `parameter.grad` after a fit. Rank 0 has the gradients of the last batch."""

    def exercise(self, run: Any) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        if trainer.is_global_zero:
            self.seen.append({name: p.grad.clone() for name, p in self.named_parameters()})


class LooksAtOptimizerStatesAfterwards(Row):
    """Reads all optimizer states after a fit.

    It goes on by hand. Rank 0 has all; a later run begins with its own.
    """

    fast = True
    shapes = EVERY

    def exercise(self, run: Any) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        if trainer.is_global_zero:
            (optimizer,) = trainer.optimizers
            self.seen.append(copy.deepcopy(optimizer.state_dict()))
            self.seen.append([optimizer.state[p]["exp_avg"].clone() for p in self.parameters()])
            before = copy.deepcopy(self.state_dict())
            optimizer.step()
            self.seen.append(copy.deepcopy(self.state_dict()))
            self.load_state_dict(before)
        run.trainer(max_steps=2).fit(self)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class LooksAtOptimizerStatesAfterAnEvaluation(LooksAtOptimizerStatesAfterwards):
    """Reads optimizer states after an evaluation behind a fit.

    The Trainer still has its optimizers.
    """

    def exercise(self, run: Any) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        for _ in range(2):
            trainer.validate(self, self.train_dataloader(), verbose=False)
            if trainer.is_global_zero:
                (optimizer,) = trainer.optimizers
                self.seen.append(copy.deepcopy(optimizer.state_dict()))
        trainer.fit_loop.epoch_loop.max_steps = 9
        trainer.fit(self)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(*batch))
