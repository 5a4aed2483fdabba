"""Which optimizers step in parts: those whose class is declared, by this package or by the user."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from lightning_hybrid import register_optimizer
from lightning_hybrid.driver import optimizer_kinds
from lightning_hybrid.driver.optimizer_kinds import refuse_deferred, why_steps_whole
from lightning_hybrid.errors import HybridError

DECLARED = sorted(k.__name__ for k in optimizer_kinds._DECLARED if "torch." in k.__module__)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    # (Muon takes matrices alone)
    return [nn.Parameter(torch.randn(2, 3, generator=generator)) for _ in range(4)]


def stepped(make: Any, owned: set[int]) -> list[torch.Tensor]:
    """The owned ones of some parameters after four steps, in which they alone have gradients."""
    ours = parameters()
    optimizer = make(ours)
    generator = torch.Generator().manual_seed(1)
    for scale in (1.0, 1e4, 0.0, 1e-3):
        for number, parameter in enumerate(ours):
            gradient = scale * torch.randn(2, 3, generator=generator)
            parameter.grad = gradient if number in owned else None
        optimizer.step()
    return [parameter.detach() for number, parameter in enumerate(ours) if number in owned]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("name", DECLARED)
def test_what_is_declared_of_torch_treats_each_parameter_by_itself(
    name: str, options: dict[str, Any]
) -> None:
    def make(of: list[nn.Parameter]) -> Optimizer:
        return getattr(torch.optim, name)(of, lr=0.1, **options)  # type: ignore[no-any-return]

    try:
        whole = stepped(make, {0, 1, 2, 3})
    except (TypeError, RuntimeError, ValueError):
        pytest.skip(f"{name} takes no {options}")
    parts = [*stepped(make, {0, 1}), *stepped(make, {2, 3})]
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert why_steps_whole(make(parameters())) == ""


class OfItsOwnOptions(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)
        self.note = "kept"


class OfItsOwnStep(Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Unknown(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


@register_optimizer
class Registered(Unknown):
    """Declared by its user."""


class OfARegisteredOne(Registered):
    """Inherits all that steps."""


@pytest.mark.parametrize("kind", [OfItsOwnOptions, Registered, OfARegisteredOne])
def test_what_inherits_all_that_steps_from_a_declared_class_is_declared(
    kind: type[Optimizer],
) -> None:
    first = kind(parameters())  # type: ignore[call-arg]
    assert why_steps_whole(first) == ""
    # (torch wraps the `step` of a class when it makes the first object of it)
    assert why_steps_whole(deepcopy(kind)(parameters())) == ""  # type: ignore[call-arg]


def test_the_one_of_torch_that_looks_at_all_parameters_steps_whole() -> None:
    assert why_steps_whole(torch.optim.LBFGS(parameters())) == "it looks at all parameters together"


@pytest.mark.parametrize("kind", [OfItsOwnStep, Unknown])
def test_any_other_class_steps_whole_with_a_line_that_says_how_to_declare_it(
    kind: type[Optimizer],
) -> None:
    reason = why_steps_whole(kind(parameters()))  # type: ignore[call-arg]
    assert f"lightning_hybrid.register_optimizer({kind.__name__})" in reason


def test_a_class_that_no_other_rank_can_import_steps_whole() -> None:
    class Local(SGD):
        pass

    assert "inside of a function" in why_steps_whole(Local(parameters(), lr=0.1))


def test_a_class_of_the_script_steps_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfTheScript(SGD):
        pass

    monkeypatch.setattr(OfTheScript, "__module__", "__main__")
    reason = why_steps_whole(OfTheScript(parameters(), lr=0.1))
    assert "defined in the script itself" in reason
    assert "module, which the script imports" in reason


def test_an_object_that_torch_has_not_made_ready_steps_whole() -> None:
    @register_optimizer
    class Bare(Optimizer):
        def __init__(self) -> None:
            self.param_groups = [{"params": []}]

    assert "Optimizer.__init__" in why_steps_whole(Bare())


def test_what_is_no_class_of_optimizers_is_refused() -> None:
    with pytest.raises(HybridError, match=r"register_optimizer takes a subclass .*Linear"):
        register_optimizer(nn.Linear)  # type: ignore[type-var]


def test_parameters_that_are_on_no_one_rank_refuse_a_whole_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An optimizer that must step whole (LBFGS, SAM), for a network made in `configure_model`."""
    optimizer = Unknown(parameters())
    refuse_deferred(optimizer, "a reason")
    monkeypatch.setattr(optimizer_kinds, "is_offloaded", lambda tensor: tensor.dim() == 2)
    with pytest.raises(HybridError, match=r"Unknown .* a reason.*configure_model.*__init__"):
        refuse_deferred(optimizer, "a reason")
