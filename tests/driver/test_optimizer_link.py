"""When the workers hear of what the user does with an optimizer."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_hybrid.driver.optimizer_link import OptimizerLink
from lightning_hybrid.errors import HybridError


class Notes:
    """Counterparts that note what they are told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def step(self, index: int, changed: Any) -> None:
        self.told.append(("step", index, changed and [group["lr"] for group in changed]))

    def zero_grad(self, index: int, set_to_none: bool) -> None:
        self.told.append(("zero_grad", index, set_to_none))

    def bring_gradients_to_owners(self) -> None:
        self.told.append("gradients")

    def state(self, index: int) -> Mapping[str, dict[str, Any]]:
        return {"bias": {"momentum_buffer": torch.ones(2)}}

    def ship(self) -> None:
        self.told.append("ship")

    @contextmanager
    def at_hand(self, optimizer: Optimizer) -> Iterator[None]:
        self.told.append("at hand")
        yield
        self.told.append("taken back")

    def share(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        return nullcontext()


class Linked:
    """An optimizer, number 3, that steps in parts, or whole for a reason."""

    def __init__(self, reason: str = "", kind: type[SGD] = SGD) -> None:
        self.notes = Notes()
        self.module = nn.Linear(2, 2)
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = kind([self.module.weight], lr=0.1, momentum=0.9)
        names = {id(p): name for name, p in self.module.named_parameters()}
        counterparts: Any = self.notes
        self.link = OptimizerLink(self.optimizer, names, 3, counterparts)
        self.link.reason, self.link.sent = reason, True
        self.link.shipped()


def test_workers_step_after_the_driver_and_hear_of_groups_that_have_changed() -> None:
    linked = Linked()
    for rate in (0.1, 0.05):
        linked.optimizer.param_groups[0]["lr"] = rate
        linked.optimizer.step()
    assert linked.notes.told == ["gradients", ("step", 3, None), "gradients", ("step", 3, [0.05])]


class Halves(SGD):
    """Sets an option before its closure, which one that is declared must not."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] /= 2
        return super().step(closure)


def test_options_that_a_step_in_parts_sets_before_its_closure_are_refused() -> None:
    linked = Linked(kind=Halves)
    with pytest.raises(
        HybridError, match=r"^Halves\.step has set options .* not declare it by register_optimizer"
    ):
        linked.optimizer.step(lambda: 1.0)
    assert ("step", 3, None) not in linked.notes.told


def test_a_closure_runs_before_the_workers_step() -> None:
    linked = Linked()

    def closure() -> torch.Tensor:
        linked.notes.told.append("closure")
        return torch.ones(())

    assert linked.optimizer.step(closure) == 1.0
    assert linked.notes.told == ["gradients", "closure", "gradients", ("step", 3, None)]


def test_a_step_that_fails_is_no_step_of_the_workers() -> None:
    linked = Linked()

    def closure() -> float:
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        linked.optimizer.step(closure)
    assert linked.notes.told == ["gradients"]


def test_an_optimizer_that_steps_whole_has_everything_at_hand() -> None:
    linked = Linked("it looks at all parameters")
    linked.optimizer.step()
    assert linked.notes.told == ["gradients", "at hand", "taken back"]


def test_gradients_are_cleared_everywhere() -> None:
    linked = Linked()
    linked.optimizer.zero_grad(set_to_none=False)
    assert linked.notes.told == [("zero_grad", 3, False)]
    assert (linked.module.weight.grad == 0).all()


def test_a_state_dict_has_the_state_of_the_workers() -> None:
    linked = Linked()
    linked.optimizer.add_param_group({"params": [linked.module.bias]})
    state = linked.optimizer.state_dict()["state"]
    assert list(state) == [1]  # of the bias, by its number; nothing has stepped here
    linked.optimizer.load_state_dict(linked.optimizer.state_dict())
    assert linked.notes.told == ["ship"]


def test_groups_that_are_added_are_new_until_they_are_sent() -> None:
    linked = Linked()
    assert not linked.link.has_new_groups
    linked.optimizer.add_param_group({"params": [linked.module.bias]})
    assert linked.link.has_new_groups
    linked.link.shipped()
    assert not linked.link.has_new_groups


def test_after_it_is_closed_the_optimizer_speaks_to_nobody() -> None:
    linked = Linked()
    linked.link.close()
    linked.optimizer.step()
    linked.optimizer.zero_grad()
    assert linked.notes.told == []
    assert {"step", "zero_grad"}.isdisjoint(vars(linked.optimizer))


def test_methods_that_the_user_has_put_on_an_optimizer_come_back() -> None:
    module = nn.Linear(2, 2)
    optimizer = SGD(module.parameters(), lr=0.1)
    mine: Any = lambda set_to_none=True: None  # noqa: E731
    vars(optimizer)["zero_grad"] = mine
    notes: Any = Notes()
    link = OptimizerLink(optimizer, {}, 0, notes)
    assert vars(optimizer)["zero_grad"] is not mine
    link.close()
    assert vars(optimizer)["zero_grad"] is mine
