"""An optimizer that counts before its closure, as it was before that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_hybrid.driver.own_changes import OwnChanges
from lightning_hybrid.errors import HybridError


class Counts(SGD):
    """Numbers, a tensor that counts in place, a history, and an attribute that comes later."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.ones(2))], lr=0.5)
        self.n, self.count, self.rates = 0, torch.zeros(1), [0.5]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        self.n += 1
        self.count += 1
        self.param_groups[0]["lr"] = 0.5 / (self.n + 1)
        self.rates.append(self.param_groups[0]["lr"])
        self.later = self.n
        assert closure is not None
        return closure()


def values(optimizer: Any) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    found = {"n": optimizer.n, "count": optimizer.count.item(), "rates": [*optimizer.rates]}
    later = getattr(optimizer, "later", None)
    return found | {"lr": group["lr"], "momentum": group["momentum"], "later": later}


def test_what_a_step_has_counted_is_undone_and_what_its_closure_has_set_is_not() -> None:
    optimizer = Counts()
    own, before, inside = OwnChanges(optimizer), values(optimizer), []

    def closure() -> None:
        own.closure_called()
        optimizer.param_groups[0]["momentum"] = 0.9
        own.check()
        with own.undone():
            inside.append(values(optimizer))

    own.begin()
    optimizer.step(closure)
    own.end()
    assert inside == [before | {"momentum": 0.9}]
    after = {"n": 1, "count": 1.0, "rates": [0.5, 0.25], "lr": 0.25, "momentum": 0.9, "later": 1}
    assert values(optimizer) == after
    with own.undone():  # the step is over
        assert values(optimizer) == after


def test_what_both_set_is_refused() -> None:
    optimizer = Counts()
    own = OwnChanges(optimizer)

    def closure() -> None:
        own.closure_called()
        optimizer.param_groups[0]["lr"] = 0.1
        own.check()

    own.begin()
    with pytest.raises(HybridError, match=r"Counts.step sets 'lr' before .* training_step sets it"):
        optimizer.step(closure)
