"""Which optimizers may be stepped in parts: the trial, without any processes."""

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from lightning_hybrid.driver import optimizer_trial
from lightning_hybrid.driver.optimizer_trial import refuse_deferred, why_whole
from lightning_hybrid.errors import HybridError

CPU = torch.device("cpu")
MATRICES = ("Muon",)  # only takes these


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 7), nn.Conv1d(2, 3, 2), nn.Linear(2, 2)])


def reason(make: Callable[[list[nn.Parameter]], Optimizer], *, matrices: bool = False) -> str:
    torch.manual_seed(0)
    net = Net()
    names = {id(p): name for name, p in net.named_parameters()}
    return why_whole(
        make([p for p in net.parameters() if p.dim() == 2 or not matrices]), names, CPU
    )


class Mine(Optimizer):
    """`change` follows the closure."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            self.change(group, [p for p in group["params"] if p.grad is not None])
        return loss

    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"foreach": True}, {"fused": True}),
        # changes a sign
        pytest.param({"maximize": True}, marks=pytest.mark.conformance),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad"),
        *("Adadelta", "ASGD", "Adafactor", "Muon", "SparseAdam"),
    ],
)
def test_the_optimizers_of_torch_step_in_parts(name: str, options: dict[str, Any]) -> None:
    kind = getattr(torch.optim, name)
    try:
        kind([nn.Parameter(torch.ones(2, 2))], lr=0.1, **options)
    except (TypeError, RuntimeError):
        pytest.skip(f"{name} takes no {options}")
    assert reason(lambda p: kind(p, lr=0.1, **options), matrices=name in MATRICES) == ""


def test_float16_steps_in_parts() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2, dtype=torch.float16)) for _ in range(3)]
    assert why_whole(torch.optim.SGD(parameters, lr=0.1), {}, CPU) == ""


class Counts(Mine):
    """In its groups and in an attribute."""

    groups: ClassVar[list[int]] = []

    def __init__(self, params: Any) -> None:
        super().__init__(params, k=0)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.groups.append(len(self.param_groups))
        loss = super().step(closure)
        self.steps += 1
        return loss

    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            p.sub_(p.grad, alpha=group["lr"] / (group["k"] + 1) / (self.steps + 1))
        group["k"] += 1


def test_groups_and_schedules_and_counts_step_in_parts() -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = Counts([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(parameters)])
        lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
        return optimizer

    assert reason(make) == ""


def test_many_groups_are_tried_as_two_of_each_kind() -> None:
    Counts.groups.clear()
    many = [nn.Parameter(torch.ones(3)) for _ in range(200)]
    names = {id(p): str(i) for i, p in enumerate(many)}
    groups = [{"params": [p], "lr": 0.1 + i} for i, p in enumerate(many)]
    assert why_whole(Counts(groups), names, CPU) == ""
    assert max(Counts.groups) == 2


class ClipsTogether(Mine):
    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        norm = sum(float(p.grad.square().sum()) for p in parameters) ** 0.5
        for p in parameters:
            p.sub_(p.grad / max(1.0, norm))


class ClipsLargeGradients(Mine):
    limit = 500.0

    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        norm = sum(float(p.grad.square().sum()) for p in parameters) ** 0.5
        for p in parameters:
            p.sub_(p.grad / max(1.0, norm / self.limit))


class ClipsVeryLargeGradients(ClipsLargeGradients):
    limit = 1e6


class SkipsWhatIsNotFinite(Mine):
    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        if all(bool(p.grad.isfinite().all()) for p in parameters):
            super().change(group, parameters)


class NotesANorm(Mine):
    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        group["norm"] = sum(float(p.grad.abs().sum()) for p in parameters)
        super().change(group, parameters)


class NotesAnAttribute(Mine):
    norm = 0.0

    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        self.norm = sum(float(p.grad.abs().sum()) for p in parameters)
        super().change(group, parameters)


class KeepsItsStateApart(Mine):
    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        super().change(group, parameters)


class DecaysWithoutGradient(Mine):
    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        super().change(group, parameters)
        for p in group["params"]:
            p.mul_(0.99)


class DividesByTheNormOfAll(Mine):
    """Not a number where all gradients are zero."""

    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        norm = sum(float(p.grad.square().sum()) for p in parameters) ** 0.5
        for p in parameters:
            p.sub_(p.grad / torch.tensor(norm))


class StepsOutOfAllNumbers(Mine):
    """Its steps are the same whatever they are made from."""

    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            p.mul_(torch.nan)


class CountsBeforeTheClosure(Mine):
    """In its groups, in an attribute, and in one that it makes itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, k=0)
        self.n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        self.m = getattr(self, "m", 0) + 1
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] = 1.0 / (self.n + self.m + group["k"])
        return super().step(closure)


class CountsBeforeTheClosureInAnAttribute(Mine):
    n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        return super().step(closure)


class CountsBeforeTheClosureInADictionary(Mine):
    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.counts = {"steps": 0}

    def step(self, closure: Any = None) -> Any:
        self.counts["steps"] += 1
        return super().step(closure)


@pytest.mark.parametrize(
    "kind",
    [
        CountsBeforeTheClosure,
        CountsBeforeTheClosureInAnAttribute,
        CountsBeforeTheClosureInADictionary,
    ],
)
def test_what_counts_before_its_closure_steps_as_a_whole(kind: type[Mine]) -> None:
    assert reason(kind) == "it counts, or sets its options, before it calls its closure"


class CallsTwice(Mine):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


class Draws(Mine):
    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        super().change(group, parameters)
        torch.rand(1)
        for p in parameters:
            p.add_(random.random() + np.random.rand())


class Wraps(Mine):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = [torch.optim.SGD(self.param_groups, lr=0.1)]


class HasAFunction(Mine):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.change = lambda group, parameters: None  # type: ignore[method-assign]


class Fails(Mine):
    def change(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        raise ArithmeticError("no")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ClipsTogether, "depends on the others"),
        (ClipsLargeGradients, "depends on the others"),
        (ClipsVeryLargeGradients, "depends on the others"),
        (SkipsWhatIsNotFinite, "depends on the others"),
        (NotesANorm, "groups"),
        (NotesAnAttribute, "attributes"),
        (KeepsItsStateApart, "belongs to no parameter"),
        (DecaysWithoutGradient, "no gradient"),
        (DividesByTheNormOfAll, "depends on the others"),
        (StepsOutOfAllNumbers, "not finite"),
        (CallsTwice, "depends on the others"),
        (Draws, "random numbers"),
        (Wraps, "`inner`: SGD"),
        (HasAFunction, "`change`"),
        (Fails, "ArithmeticError: no"),
        (torch.optim.LBFGS, "alone"),
    ],
)
def test_what_depends_on_all_parameters_steps_whole(kind: type[Optimizer], words: str) -> None:
    assert words in reason(lambda parameters: kind(parameters))


def test_the_trial_leaves_the_optimizer_and_the_generators_as_they_were() -> None:
    net = Net()
    optimizer = Draws(net.parameters())
    before = [p.detach().clone() for p in net.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert why_whole(optimizer, {}, CPU)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_a_class_that_no_other_rank_can_import_steps_whole() -> None:
    class Local(Mine):
        pass

    assert "Local" in reason(Local)


def test_parameters_that_are_on_no_one_rank_refuse_a_whole_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An optimizer that must step whole (LBFGS, SAM), for a network made in `configure_model`."""
    optimizer = ClipsTogether(Net().parameters())
    refuse_deferred(optimizer, "a reason")
    monkeypatch.setattr(optimizer_trial, "is_offloaded", lambda tensor: tensor.dim() == 2)
    with pytest.raises(HybridError, match=r"ClipsTogether .* a reason.*configure_model.*__init__"):
        refuse_deferred(optimizer, "a reason")
