"""Optimizers that do more than to treat each parameter by itself."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from rows_networks import TiesAcrossStages
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Row, Run, load_checkpoint
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cosine_similarity
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
Closure = Callable[[], Any] | None


# ---------------------------------------------------------------- the optimizers


class _Plain(Optimizer):
    """Calls the closure first; `change` is what follows."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.change()
        return loss

    def change(self) -> None:
        raise NotImplementedError

    def trained(self, group: dict[str, Any]) -> list[Parameter]:
        return [p for p in group["params"] if p.grad is not None]

    def all_trained(self) -> list[Parameter]:
        return [p for group in self.param_groups for p in self.trained(group)]


class ClippedLamb(_Plain):
    """LAMB with one norm of all gradients, as timm has it."""

    def change(self) -> None:
        gradients = [p.grad for p in self.all_trained()]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        factor = (norm / 0.5).clamp(min=1.0)
        for group in self.param_groups:
            for p in self.trained(group):
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                gradient = p.grad / factor
                state["mean"].lerp_(gradient, 0.1)
                state["square"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                update = state["mean"] / (state["square"].sqrt() + 1e-6) + 0.01 * p
                trust = (p.norm() / update.norm()).clamp(max=10.0)
                p.data.add_(update * trust, alpha=-group["lr"])  # as older code writes


class StepSizeFromAll(_Plain):
    """Grows its step size by what all parameters have travelled, as Prodigy does."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, d=1e-2, travelled=0.0)

    def change(self) -> None:
        group = self.param_groups[0]
        for p in self.all_trained():
            start = self.state[p].setdefault("start", p.detach().clone())
            group["travelled"] += group["d"] * float((p.grad * (start - p)).sum())
        group["d"] = max(group["d"], min(0.2, group["d"] * 1.2 + abs(group["travelled"])))
        for p in self.all_trained():
            p.add_(p.grad, alpha=-group["d"])


class ScheduleFree(_Plain):
    """Counts in its groups; ``train`` and ``eval`` exchange the weights for their average."""

    def __init__(self, params: Iterable[Any], lr: float = 0.5) -> None:
        super().__init__(params, lr, k=0, training=True)

    def change(self) -> None:
        for group in self.param_groups:
            share = 1.0 / (group["k"] + 1)
            for p in self.trained(group):
                state = self.state[p]
                fast = state.setdefault("fast", p.detach().clone())
                p.lerp_(fast, share)
                p.sub_(p.grad, alpha=group["lr"] * (0.9 * (1 - share)))
                fast.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1

    @torch.no_grad()
    def eval(self) -> None:
        self._turn(to_training=False, weight=1 - 1 / 0.9)

    @torch.no_grad()
    def train(self) -> None:
        self._turn(to_training=True, weight=1 - 0.9)

    def _turn(self, *, to_training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["training"] is not to_training:
                for p in group["params"]:
                    if "fast" in self.state[p]:
                        p.data.lerp_(self.state[p]["fast"], weight)
                group["training"] = to_training


class Langevin(_Plain):
    """Adds noise to every step (SGLD)."""

    def change(self) -> None:
        for group in self.param_groups:
            for p in self.trained(group):
                noise = torch.randn_like(p) * (2 * group["lr"]) ** 0.5
                p.add_(-group["lr"] * p.grad + 0.1 * noise)


class SharpnessAware(Optimizer):
    """SAM around another optimizer; calls the closure in the middle, or is called in two halves."""

    def __init__(self, params: Iterable[Any], rho: float, base: type[Optimizer], **options: Any):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        trained = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for p in trained:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "old" in self.state[p]:
                    p.data = self.state[p]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


class ExtraGradient(_Plain):
    """Takes the gradient where a first step would lead, and steps from where it was."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        start = [p.clone() for p in self.all_trained()]
        self.descend()
        with torch.enable_grad():
            closure()
        for p, before in zip(self.all_trained(), start):
            p.copy_(before)
        self.descend()
        return loss

    def descend(self) -> None:
        for group in self.param_groups:
            for p in self.trained(group):
                p.sub_(p.grad, alpha=group["lr"])


class Optimistic(_Plain):
    """Optimistic gradient descent: keeps the gradients of the step before, as they are."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.before: dict[Tensor, Tensor] = {}

    def change(self) -> None:
        for group in self.param_groups:
            for p in self.trained(group):
                p.sub_(2 * p.grad - self.before.get(p, 0), alpha=group["lr"])
                self.before[p] = p.grad


class SumsNorms(_Plain):
    """Divides by the sum of all norms so far, a number of the type that new tensors have."""

    def change(self) -> None:
        for p in self.all_trained():
            total = self.state[p].setdefault("total", torch.zeros((), device=p.device))
            total += p.grad.norm()
            p.sub_(p.grad / total, alpha=0.1)


class Lookahead(Optimizer):
    """Every second step the weights go half the way back. Does not call ``Optimizer.__init__``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state: Any = defaultdict(dict)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)  # type: ignore[arg-type]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.count % 2 == 0:
                    p.data.copy_(slow.lerp_(p.data, 0.5))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        slow = [self.state[p].get("slow") for g in self.param_groups for p in g["params"]]
        return {"fast": self.optimizer.state_dict(), "slow": slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["fast"])
        self.param_groups = self.optimizer.param_groups
        parameters = [p for g in self.param_groups for p in g["params"]]
        for p, slow in zip(parameters, state_dict["slow"]):
            self.state[p] = {} if slow is None else {"slow": slow}
        self.count = state_dict["count"]


class AdamThatDecays(Adam):
    """Its step calls that of its base class, and goes on."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)  # type: ignore[arg-type]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.99)
        return loss


# ---------------------------------------------------------------- the rows


class _Optimized(Row):
    """`make` is its optimizer; what the groups hold is looked at after each step."""

    shapes = EVERY

    def make(self) -> Optimizer:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return self.make()

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.optimizers().optimizer
        for group in optimizer.param_groups:
            self.seen.append({k: v for k, v in group.items() if isinstance(v, int | float)})


class ClipsInItsStep(_Optimized):
    """LAMB with one norm of all gradients, as timm has it. It steps on the driver."""

    sampled = True

    def make(self) -> Optimizer:
        return ClippedLamb(self.parameters(), lr=0.05)


class ClipsInItsStepAndMore(ClipsInItsStep):
    """LAMB with groups, a schedule, accumulation and Lightning's clipping.

    It has one norm of all gradients. It steps on the driver.
    """

    options: ClassVar = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.8}

    def configure_optimizers(self) -> Any:
        rest = [*self.net.second.parameters(), *self.net.third.parameters()]
        groups = [{"params": self.net.first.parameters(), "lr": 0.02}, {"params": rest}]
        optimizer = ClippedLamb(groups, lr=0.05)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.seen.append([p.grad.norm().item() for p in self.parameters() if p.grad is not None])

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.seen.append([p.sum().item() for p in self.parameters()])


class ClipsInItsStepByHand(ClipsInItsStep):
    """Manual optimization with two optimizers, one of which steps on the driver.

    It is LAMB with one norm of all gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        outer = [*self.net.first.parameters(), *self.net.third.parameters()]
        return [ClippedLamb(outer, lr=0.05), SGD(self.net.second.parameters(), lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(*batch)
        self.seen.append(loss.item())
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            self.seen.append([p.sum().item() for p in self.parameters()])
            optimizer.zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        """The groups say nothing here."""


class MakesNumbersInItsStep(_Optimized):
    """The optimizer makes tensors of the default type, 64 bits, in its step.

    It steps within `training_step`.
    """

    sampled = True
    options: ClassVar = {"precision": "64-true"}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def make(self) -> Optimizer:
        return SumsNorms(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(*batch)
        self.seen.append(loss.item())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class ClipsInItsStepTiedWeights(TiesAcrossStages):
    """LAMB with one norm of all gradients, and tied weights. It steps on the driver."""

    def configure_optimizers(self) -> Any:
        return ClippedLamb(self.parameters(), lr=0.05)


class LooksAtStatesOfTiedWeights(TiesAcrossStages):
    """Reads the optimizer's state of a tied weight.

    It is trained under its first name, on whichever rank it is.
    """

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.log("in_the_bar", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        optimizer = self.optimizers().optimizer
        saved = optimizer.state_dict()["state"]
        self.seen.append([saved[key]["exp_avg"].sum().item() for key in saved])
        self.seen.append([optimizer.state[p]["exp_avg"].sum().item() for p in self.parameters()])


class ResumesOptimizers(_Optimized):
    """Saves and resumes an optimizer that steps on the driver.

    Its states are looked at on the way.
    """

    fast = True

    def make(self) -> Optimizer:
        return ClippedLamb(self.parameters(), lr=0.05)

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.optimizers().optimizer
        states = [optimizer.state[p] for g in optimizer.param_groups for p in g["params"]]
        self.seen.append([s["mean"].sum().item() for s in states])
        saved = optimizer.state_dict()["state"]
        self.seen.append([saved[key]["square"].sum().item() for key in saved])

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer(max_steps=3)
        trainer.fit(self)
        path = run.folder / "half.ckpt"
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
        run.trainer().fit(self, ckpt_path=path, weights_only=False)
        return load_checkpoint(path, weights_only=False)["optimizer_states"]


class EstimatesItsStepSize(_Optimized):
    """The step size grows with the distance of all parameters, as in Prodigy.

    It steps on the driver.
    """

    def make(self) -> Optimizer:
        return StepSizeFromAll(self.parameters())


class CountsInItsGroups(_Optimized):
    """A schedule-free optimizer validates with the average of `eval` and `train`.

    It counts in its groups.
    """

    sampled = True

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        return {"val_check_interval": 2, "check_val_every_n_epoch": None}

    def make(self) -> Optimizer:
        return ScheduleFree(self.parameters())

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def on_train_start(self) -> None:
        self.optimizers().train()

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.optimizers().eval()

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.optimizers().train()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(*batch).item())


class DrawsNoiseInItsStep(_Optimized):
    """The optimizer adds noise to every step (SGLD). It steps on the driver."""

    control = False  # random numbers

    def make(self) -> Optimizer:
        return Langevin(self.parameters(), lr=0.05)


class DrawsNoiseAfterAWarmUp(DrawsNoiseInItsStep):
    """A rate of zero hides the noise of the optimizer at first.

    It steps on the driver from then on.
    """

    def configure_optimizers(self) -> Any:
        optimizer = SelectiveLangevin(self.parameters(), lr=0.05)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 2) / 3)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class SelectiveLangevin(Langevin):
    """Draws only where there is something to draw; momentum is its state."""

    def change(self) -> None:
        for group in self.param_groups:
            for p in self.trained(group):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(momentum, alpha=group["lr"])
                if group["lr"]:
                    p.add_(torch.randn_like(p), alpha=0.1 * group["lr"])


class PerturbsWeights(_Optimized):
    """SAM: the closure runs twice in a step. It steps on the driver."""

    sampled = True

    def make(self) -> Optimizer:
        return SharpnessAware(self.parameters(), rho=0.2, base=SGD, lr=0.1, momentum=0.9)


class PerturbsWeightsByHand(PerturbsWeights):
    """SAM in two halves, under manual optimization. It steps on the driver."""

    options: ClassVar = {"max_epochs": 2}  # Lightning counts calls of `step`

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for half in (optimizer.first_step, optimizer.second_step):
            loss = self.loss(*batch)
            self.seen.append(loss.item())
            self.manual_backward(loss)
            half(zero_grad=True)


class StepsFromWhereItWas(_Optimized):
    """Extragradient.

    It takes the gradient where a first step would lead, and steps from where it was. It steps on
    the driver.
    """

    def make(self) -> Optimizer:
        return ExtraGradient(self.parameters(), lr=0.2)


class LooksAhead(_Optimized):
    """Lookahead around another optimizer, with a schedule. It steps on the driver."""

    def configure_optimizers(self) -> Any:
        inner = SGD(self.parameters(), lr=0.2, momentum=0.9)
        optimizer = Lookahead(inner)
        schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer(max_steps=3)
        trainer.fit(self)
        path = run.folder / "half.ckpt"
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
        run.trainer().fit(self, ckpt_path=path, weights_only=False)


class KeepsGradients(_Optimized):
    """The optimizer keeps the last gradient and extrapolates.

    A hook keeps it too. It steps on the driver.
    """

    sampled = True
    kept: Tensor | None = None

    def make(self) -> Optimizer:
        return Optimistic(self.parameters(), lr=0.05)

    def on_before_optimizer_step(self, _: Optimizer) -> None:
        gradient = self.net.first.weight.grad
        assert gradient is not None
        if self.kept is not None:
            self.seen.append(cosine_similarity(gradient.flatten(), self.kept.flatten(), dim=0))
        self.kept = gradient


class StepsByProdigy(_Optimized):
    """Prodigy of `prodigyopt`. It estimates its step size from all parameters."""

    needs = "prodigyopt"

    def make(self) -> Optimizer:
        from prodigyopt import Prodigy

        found: Optimizer = Prodigy(self.parameters(), lr=1.0, safeguard_warmup=True)
        return found


class StepsWithoutASchedule(_Optimized):
    """An optimizer of `schedulefree`. Its weights are others in evaluation than in training."""

    needs = "schedulefree"

    def make(self) -> Optimizer:
        from schedulefree import AdamWScheduleFree

        found: Optimizer = AdamWScheduleFree(self.parameters(), lr=0.05, warmup_steps=2)
        return found

    def on_train_epoch_start(self) -> None:
        self.optimizers().optimizer.train()

    def on_train_epoch_end(self) -> None:
        self.optimizers().optimizer.eval()


class SearchesLines(_Optimized):
    """LBFGS. It steps on the driver."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    tolerance = 1e-7  # its line search makes more of the last digit

    def make(self) -> Optimizer:
        return torch.optim.LBFGS(
            self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
        )


class HasStepHooks(_Optimized):
    """Hooks before and after the optimizer's step see all parameters.

    They are made before the run and in it.
    """

    sampled = True

    def make(self) -> Optimizer:
        optimizer = Adam(self.parameters(), lr=0.05)
        optimizer.register_step_pre_hook(self.note)
        optimizer.register_step_post_hook(self.note)
        optimizer.register_step_post_hook(self.bound)
        return optimizer

    def on_train_start(self) -> None:
        self.optimizers().optimizer.register_step_pre_hook(self.note)
        self.optimizers().optimizer.register_step_post_hook(self.note)

    def note(self, *_: Any) -> None:
        self.seen.append([p.sum().item() for p in self.parameters()])
        self.seen.append([p.grad.sum().item() for p in self.parameters() if p.grad is not None])

    def bound(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.4, 0.4)


class StepsTwiceInAStep(_Optimized):
    """The optimizer's step calls that of its base class; hooks run in both."""

    def make(self) -> Optimizer:
        Adam([torch.zeros(1)])  # from now on the steps of Adam run hooks
        return AdamThatDecays(self.parameters(), lr=0.05)


class LooksAtStates(_Optimized):
    """Reads, changes and drops entries of `optimizer.state`."""

    def make(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.optimizers().optimizer.state
        self.seen.append([state[p]["momentum_buffer"].sum().item() for p in self.parameters()])
        self.seen.append([sorted(part) for part in state.values()])
        if self.trainer.global_step == 2:
            for part in state.values():
                part["momentum_buffer"].mul_(0.5)
        if self.trainer.global_step == 3:
            state.clear()
        if self.trainer.global_step == 4:
            self.optimizers().optimizer.state = defaultdict(dict)
        self.seen.append(len(state))


class ChangesAttributes(_Optimized):
    """Changes an attribute of the optimizer that its step reads."""

    class Scaled(_Plain):
        scale = 1.0

        def __init__(self, params: Iterable[Any]) -> None:
            super().__init__(params)
            self.scale, self.count = 1.0, 0

        def change(self) -> None:
            self.count += 1
            for p in self.all_trained():
                p.sub_(p.grad, alpha=0.1 * self.scale / self.count)

    def make(self) -> Optimizer:
        return self.Scaled(self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.optimizers().optimizer
        self.seen.append(optimizer.count)
        if self.trainer.global_step == 2:
            optimizer.scale = 3.0
        if self.trainer.global_step == 4:
            optimizer.count = 0


class Noam(Adam):
    """Counts its steps, and sets its rate, before it calls the closure."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.0)
        self.n, self.recent = 0, [0.0]

    def step(self, closure: Closure = None) -> Any:  # type: ignore[override]
        self.n += 1
        self.recent.append(0.03 * min(self.n**-0.5, self.n * 3**-1.5) * len(self.recent) ** 0.1)
        for group in self.param_groups:
            group["lr"] = self.recent[-1]
        return super().step(closure)


class CountsBeforeItsClosure(_Optimized):
    """The optimizer sets its rate before it calls the closure (Noam).

    It counts its steps. It steps on the driver.
    """

    sampled = True

    def make(self) -> Optimizer:
        return Noam(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers().optimizer
        self.seen.append([optimizer.n, optimizer.param_groups[0]["lr"]])
        if self.global_step == 4:
            optimizer.param_groups[0]["eps"] = 1e-2  # the user's own
        return super().training_step(batch, batch_idx)


class CountsBeforeItsClosureByHand(CountsBeforeItsClosure):
    """The optimizer sets its rate before its closure, under manual optimization.

    Lightning's closure does nothing there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


class MakesAnOptimizerAnew(Row):
    """Calls `optimizer.__init__` again in mid-run. No states and no hooks are left."""

    shapes = EVERY

    def configure_optimizers(self) -> Optimizer:
        return Adam(self.parameters(), lr=0.05)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 3:
            optimizer: Any = self.optimizers()
            optimizer.optimizer.__init__(self.parameters(), lr=0.02)
