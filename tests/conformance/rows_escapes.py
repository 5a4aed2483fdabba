"""What leaves a network beside its output: features, auxiliary losses, counters, hooks' notes."""

import contextlib
import io
import types
from typing import Any, ClassVar

import torch
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row, Run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)


# ---------------------------------------------------------------- by forward hooks


class KeepsFeatures(Row):
    """Forward hooks keep what layers return, and the loss uses it."""

    sampled = True
    shapes = EVERY

    def build(self) -> None:
        super().build()
        self.features: dict[str, Tensor] = {}
        for name, layer in self.net.named_children():
            layer.register_forward_hook(self.keeper(name))

    def keeper(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.features[name] = output

        return keep

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.seen.append({name: t.detach().clone() for name, t in self.features.items()})
        return loss + 0.1 * sum(t.square().mean() for t in self.features.values())


class KeepsFeaturesForItself(KeepsFeatures):
    """Forward hooks keep what layers return, only to look at it: no gradient comes back."""

    shapes = EVERY

    def keeper(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.features[name] = output.detach().clone()

        return keep


class KeepsInputsOfALayer(Row):
    """A forward pre-hook keeps the input of a layer."""

    def build(self) -> None:
        super().build()
        self.net.second.register_forward_pre_hook(self.keep)

    def keep(self, module: nn.Module, inputs: tuple[Tensor]) -> None:
        [self.kept] = inputs

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.kept.abs().mean()


class KeepsFeaturesWhenFitStarts(KeepsFeatures):
    """`on_fit_start`, which only drivers run, adds forward hooks."""

    def build(self) -> None:
        self.net, self.features = Layers(), {}

    def on_fit_start(self) -> None:
        for name, layer in self.net.named_children():
            layer.register_forward_hook(self.keeper(name))


class AddsAHookForAWhile(KeepsFeatures):
    """Adds a forward hook in mid-run and removes it again."""

    def build(self) -> None:
        self.net, self.features = Layers(), {}

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.handle = self.net.first.register_forward_hook(self.keeper("first"))
        if self.trainer.global_step == 4:
            self.handle.remove()
            self.features.clear()


class HooksChangeValues(Row):
    """Hooks before and behind layers change inputs and outputs."""

    fast = True

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.third(torch.tanh(self.second(input=x)) + x)

    def build(self) -> None:
        self.net = self.Net()
        self.net.third.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
        self.net.first.register_forward_hook(lambda module, inputs, output: output.clamp(-1, 1))
        self.net.second.register_forward_hook(self.add, with_kwargs=True)

    @staticmethod
    def add(module: nn.Module, inputs: Any, named: dict[str, Tensor], output: Tensor) -> Tensor:
        return output + named["input"]


class HooksTheNetwork(Row):
    """Hooks before and after the call of the network itself."""

    shapes = EVERY

    def build(self) -> None:
        super().build()
        self.net.register_forward_pre_hook(self.before)
        self.net.register_forward_hook(self.after)

    def before(self, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        self.seen.append(inputs[0].shape)
        return (inputs[0] * 2,)

    def after(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        self.seen.append([inputs[0].sum().item(), output.detach().clone()])
        return output / 2


class HooksAllModules(Row):
    """`register_module_forward_hook`: a hook on all modules."""

    def exercise(self, run: Run) -> Any:
        self.sums: list[Tensor] = []
        handle = nn.modules.module.register_module_forward_hook(self.note)
        try:
            return super().exercise(run)
        finally:
            handle.remove()

    def note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Linear):
            self.sums.append(output.detach().sum(1))

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(list(self.sums))
        self.sums.clear()


# ---------------------------------------------------------------- backward hooks


class HooksTheBackward(Row):
    """Full backward hooks note the gradients at a layer of each stage."""

    sampled = True
    equal_or_refused = ("full backward hook", "first")

    def build(self) -> None:
        super().build()
        self.net.first.register_full_backward_hook(self.note)
        self.net.third.register_full_backward_hook(self.note)

    def note(self, module: nn.Module, into: Any, out: tuple[Tensor]) -> None:
        self.seen.append(out[0].clone())


class ChangesGradientsInABackwardHook(Row):
    """A full backward hook on an inner layer clips gradients on their way."""

    equal_or_refused = ("full backward hook", "second")

    def build(self) -> None:
        super().build()
        self.net.second.register_full_backward_hook(self.clip)

    @staticmethod
    def clip(module: nn.Module, into: tuple[Tensor | None, ...], out: Any) -> Any:
        return tuple(g if g is None else g.clamp(-0.01, 0.01) for g in into)


class HooksTheNetworksBackward(Row):
    """A full backward hook on the network that is cut."""

    equal_or_refused = ("backward hook", "net")
    works = EVERY

    def build(self) -> None:
        super().build()
        self.net.register_full_backward_hook(self.note)

    def note(self, module: nn.Module, into: Any, out: tuple[Tensor]) -> None:
        self.seen.append(out[0].clone())


class HooksATensor(Row):
    """`Tensor.register_hook` inside of `forward` reverses gradients, as for domain adaptation."""

    equal_or_refused = ("register_hook",)

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            if x.requires_grad:
                x.register_hook(lambda gradient: -0.5 * gradient)
            return self.third(torch.tanh(self.second(x)))

    def build(self) -> None:
        self.net = self.Net()


class HooksWeights(Row):
    """Hooks on weights scale their gradients and look at them."""

    def build(self) -> None:
        super().build()
        self.net.first.weight.register_hook(lambda gradient: gradient * 0.5)
        self.net.third.weight.register_hook(lambda gradient: gradient * 2)


class ClampsGradientsInHooks(HooksWeights):
    """Hooks on weights clamp gradients. They hear of each backward once, of the sum over all
    micro-batches.
    """

    sampled = True
    shapes = EVERY

    def build(self) -> None:
        super().build()
        for parameter in self.net.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class ClampsSumsOfGradients(Row):
    """`register_post_accumulate_grad_hook` clamps `weight.grad`, while two batches are
    accumulated.
    """

    shapes = EVERY
    options: ClassVar = {"accumulate_grad_batches": 2}

    def build(self) -> None:
        super().build()
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(self.clamp)

    @staticmethod
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)


class HearsOfTwoCallsTogether(ClampsGradientsInHooks):
    """A hook on a weight gets the sum of two calls and a penalty."""

    shapes = EVERY
    trains = False  # that of the penalty arises on the driver

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        twice = super().loss(x, y) + super().loss(x.flip(1), y)
        return twice + 0.1 * sum(p.square().sum() for p in self.net.parameters())


class StepsInTheBackward(Row):
    """Each weight has its own optimizer, which steps in a hook.

    It forgets the gradient as soon as it is there.
    """

    sampled = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)  # with replicas each steps with its own gradients

    def build(self) -> None:
        super().build()
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(self.stepper(parameter))

    @staticmethod
    def stepper(parameter: nn.Parameter) -> Any:
        optimizer = torch.optim.Adam([parameter], lr=0.01)

        def step(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    def configure_optimizers(self) -> None:
        return None


class HooksWeightsLater(Row):
    """Hooks on weights of other ranks, put on in a hook of Lightning."""

    sampled = True

    def on_fit_start(self) -> None:
        self.net.first.weight.register_hook(lambda gradient: gradient * 0.5)


class LooksWhereItLooked(Row):
    """Grad-CAM in a training step: a hook keeps a feature map and, after the backward, its gradient
    by `retain_grad`. What comes before the hook is cut, and what comes behind it runs on the
    driver.
    """

    cuts: ClassVar = {2: ["net.first.2"], 3: ["net.first.2", "net.first.4"]}

    def build(self) -> None:
        super().build()
        first: Any = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
        )
        self.net.first = first
        self.net.second.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.retain_grad()
        self.kept = output

    def on_after_backward(self) -> None:
        self.seen.append((self.kept.grad * self.kept).detach().sum(1))


# ---------------------------------------------------------------- attributes set in `forward`


class StoresAnAuxiliaryLoss(Row):
    """Layers store auxiliary losses as attributes, as mixtures of experts do.

    Each is a mean over the batch.
    """

    sampled = True
    shapes = EVERY

    class Penalised(nn.Linear):
        penalty: Tensor

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.penalty = x.square().mean()
            return torch.tanh(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            penalised = StoresAnAuxiliaryLoss.Penalised
            self.first, self.second, self.third = penalised(6, 8), penalised(8, 8), penalised(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x)))

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        penalties = [m.penalty for m in self.net.children()]
        self.seen.append([p.item() for p in penalties])
        return loss + 0.1 * sum(penalties)


class AddsUpLosses(Row):
    """`forward` adds to `self.aux_loss`, which each step clears."""

    cuts: ClassVar = {2: ["second"], 3: ["second", "third"]}

    def build(self) -> None:
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.extra: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = torch.tanh(layer(x))
            self.extra = self.extra + x.square().sum(1)
        return self.third(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.extra = 0.0
        return cross_entropy(self(x), y) + 0.01 * self.extra.mean()


class StoresAttention(Row):
    """Layers store their attention maps, and the steps look at them."""

    cuts: ClassVar = {2: ["net.layers.1"]}

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(2, 6)
            self.out = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.mix(x).chunk(3, dim=-1)
            self.map = (q @ k.transpose(1, 2)).softmax(-1)
            return x + self.out(self.map @ v)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(StoresAttention.Attention() for _ in range(3))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.view(-1, 3, 2)
            for layer in self.layers:
                x = layer(x)
            return self.head(x.flatten(1))

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        maps = [layer.map for layer in self.net.layers]
        self.seen.append([m.detach().clone() for m in maps])
        entropy = sum(-(m * m.log()).sum(-1).mean() for m in maps)
        return loss + 0.05 * entropy


class AppendsToAList(Row):
    """A list on the network grows by each call; the step empties it now and then."""

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            self.history.append(x.detach().norm(dim=1))
            x = torch.tanh(self.second(x)) + x
            self.history.append(x.detach().norm(dim=1))
            return self.third(x)

    def build(self) -> None:
        self.net = self.Net()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(list(self.net.history))
        if len(self.net.history) >= 6:
            self.net.history.clear()


class CountsInTheNetwork(Row):
    """The network increases and uses a counter of its own: once per call, however many
    micro-batches there are.
    """

    shapes = EVERY

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.sizes: dict[int, int] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.sizes[len(x)] = self.sizes.get(len(x), 0) + 1
            return super().forward(x) * min(1.0, self.calls / 4)

    def build(self) -> None:
        self.net = self.Net()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([self.net.calls, dict(self.net.sizes)])


class CountsOnTheClass(Row):
    """The network increases a counter that belongs to its class."""

    class Net(Layers):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x)

    def build(self) -> None:
        self.net = self.Net()

    def on_train_start(self) -> None:
        self.Net.calls = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.Net.calls)


class PrintsInTrainingAlone(Row):
    """Prints in training alone: evaluations are another graph, on the driver."""

    equal_or_refused = ("print(", "fewer than 3 stages")  # the parts between
    works = (ONE_OF_TWO, TWO_OF_TWO)

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            if self.training:
                print("hidden", tuple(x.shape), x.dtype)
            return self.third(torch.tanh(self.second(x)) + x)

    def build(self) -> None:
        self.net = self.Net()

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset(seed=2), batch_size=4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(*batch), sync_dist=True)


class PrintsInTrainingWithoutASanityCheck(PrintsInTrainingAlone):
    """Prints in training alone, without a sanity check.

    The first validation, which could be one graph, comes when the stages suit the graphs of the
    training.
    """

    equal_or_refused = ()
    shapes = (ONE_OF_TWO, TWO_OF_TWO)
    options: ClassVar = {"num_sanity_val_steps": 0}


class Prints(Row):
    """Prints lines of text from within the network."""

    sampled = True
    equal_or_refused = ("print(", "fewer than 3 stages")  # the parts between
    works = (ONE_OF_TWO, TWO_OF_TWO)

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            print("hidden", tuple(x.shape), x.dtype)
            return self.third(torch.tanh(self.second(x)) + x)

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            loss = super().loss(x, y)
        self.seen.append(text.getvalue())
        return loss


class KeepsMessages(Row):
    """A method of the network keeps messages with numbers in a list."""

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[str] = []

        def say(self, text: str) -> None:
            self.messages.append(text)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.say(f"training on {x.shape[1]} features, call {len(self.messages)}")
            return super().forward(x)

    def build(self) -> None:
        self.net = self.Net()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(list(self.net.messages))


# ---------------------------------------------------------------- arguments that are written to


class WritesIntoADictionary(Row):
    """The network writes into a dictionary of the caller."""

    class Net(Layers):
        def forward(self, x: Tensor, cache: dict[str, Any]) -> Tensor:
            cache["hidden"] = torch.tanh(self.first(x))
            cache["calls"] = cache.get("calls", 0) + 1
            cache["late"] = torch.tanh(self.second(cache["hidden"]))
            return self.third(cache["late"])

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        cache: dict[str, Any] = {}
        loss = cross_entropy(self.net(x, cache), y)
        self.seen.append([cache["calls"], cache["late"].detach().clone()])
        return loss + 0.1 * cache["hidden"].square().mean() + 0.1 * cache["late"].abs().mean()


class ReturnsItsArgument(Row):
    """The network adds entries to the batch, a dictionary, and returns it."""

    class Net(Layers):
        def forward(self, batch: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
            batch["logits"] = super().forward(batch["x"])
            batch.pop("spare")
            return batch

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        batch = {"x": x, "y": y, "names": ["a"] * len(x), "spare": 1}
        output = self.net(batch)
        self.seen.append([output is batch, sorted(batch), output["x"] is x])
        return cross_entropy(output["logits"], output["y"])


class WritesIntoATensor(Row):
    """The network normalises the batch in place."""

    fast = True

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x.sub_(0.5).mul_(2)
            return super().forward(x)

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.seen.append(x.clone())
        return loss + 0.01 * x.square().mean()


class AppendsToTheCallersList(Row):
    """`forward(x, features)` appends to the caller's list, as for perceptual losses."""

    class Net(Layers):
        def forward(self, x: Tensor, features: list[Tensor]) -> Tensor:
            for layer in (self.first, self.second, self.third):
                x = layer(x)
                features.append(x)
                x = torch.tanh(x)
            return x

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        features: list[Tensor] = []
        other: list[Tensor] = []
        output = self.net(x, features)
        with torch.no_grad():
            self.net(x.flip(1), other)
        distance = sum((a - b).square().mean() for a, b in zip(features, other))
        return cross_entropy(output, y) + 0.1 * distance


class ReturnsItsWeights(Row):
    """The network returns its weights and its input beside the output."""

    equal_or_refused = ("third.weight",)
    works = EVERY
    trains = False  # gradients of the penalty arise on the driver

    class Net(Layers):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.third.weight, self.first.bias, x

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output, weight, bias, again = self.net(x)
        assert again is x
        return cross_entropy(output, y) + 0.01 * weight.square().sum() + bias.square().sum()


# ---------------------------------------------------------------- other `forward`s


class HasAForwardOfItsOwn(Row):
    """The instance has a `forward` that its class has not."""

    def build(self) -> None:
        super().build()

        def forward(net: Layers, x: Tensor) -> Tensor:
            return net.third(torch.relu(net.second(torch.relu(net.first(x)))))

        self.net.forward = types.MethodType(forward, self.net)  # type: ignore[method-assign]


class PatchesALayer(Row):
    """`forward` of layers is wrapped by a closure and by a method."""

    def build(self) -> None:
        super().build()
        first = self.net.first.forward
        self.net.first.forward = lambda x: first(x) * 0.5  # type: ignore[method-assign]

        def plain(layer: nn.Linear, x: Tensor) -> Tensor:
            return nn.functional.linear(x, layer.weight.tanh(), layer.bias)

        self.net.third.forward = types.MethodType(plain, self.net.third)  # type: ignore


class PatchesALayerInMidRun(Row):
    """Wraps `forward` of a layer in mid-run, and puts it back."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            plain = self.net.second.forward
            self.net.second.forward = lambda x: plain(x).abs()  # type: ignore[method-assign]
        if self.trainer.global_step == 4:
            del self.net.second.forward


class ChangesItsClass(Row):
    """A layer changes its class and keeps its weights, as in quantisation."""

    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight + (self.weight.round(decimals=1) - self.weight).detach()
            return nn.functional.linear(x, weight, self.bias)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.net.second.__class__ = self.Rounded


class CallsAnotherMethod(Row):
    """Calls `self.net.features(x)` and then the head, and so never the network itself."""

    equal_or_refused = ("net",)

    class Net(Layers):
        def features(self, x: Tensor) -> Tensor:
            return torch.tanh(self.second(torch.tanh(self.first(x))))

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net.third(self.net.features(x)), y)


class StopsInTheMiddle(Row):
    """A hook leaves the network by an exception, which the user's code catches."""

    sampled = True
    equal_or_refused = ("Enough",)
    works = EVERY

    class Enough(Exception):
        pass

    def build(self) -> None:
        super().build()
        self.looks = False
        self.net.second.register_forward_hook(self.stop)

    def stop(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.looks:
            raise self.Enough

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.looks = True
        with contextlib.suppress(self.Enough), torch.no_grad():
            self.net(x)
            self.seen.append("not stopped")
        self.looks = False
        return super().loss(x, y)
