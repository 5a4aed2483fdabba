"""Optimizers that travel go on, around another rank's parameters, as they would have here."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_hybrid.state.optimizers import (
    NamedGroups,
    StepsElsewhere,
    complete,
    groups_of,
    ship,
    take_groups,
    unship,
)


class Counting(SGD):
    """A user's own, with attributes beside the groups."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.steps = [0]
        self.favourite = self.param_groups[0]["params"][0]
        self.report = lambda: "of the driver"

    def step(self, closure: Any = None) -> Any:
        self.steps[0] += 1
        return super().step(closure)


class Nothing(Optimizer):
    """As Lightning's own, where `configure_optimizers` returns None."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        pass


def pair() -> tuple[nn.Module, nn.Module]:
    """A network on two ranks, with the same gradients."""
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    there = deepcopy(here)
    for mine, theirs in zip(here.parameters(), there.parameters()):
        mine.grad = torch.randn_like(mine)
        theirs.grad = mine.grad.clone()
    return here, there


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def named_in(module: nn.Module) -> NamedGroups:
    return NamedGroups(names(module))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": module[1].parameters(), "lr": 0.5},  # type: ignore[index]
        {"params": module[0].parameters()},  # type: ignore[index]
    ]


@pytest.mark.parametrize("kind", [Counting, AdamW])
def test_it_steps_as_it_would_have_here(kind: Any) -> None:
    here, there = pair()
    mine = kind(groups(here), lr=0.1, weight_decay=0.1)
    for optimizer in (mine, kind(groups(there), lr=0.1, weight_decay=0.1)):
        optimizer.step()
    [theirs] = unship(*ship([mine], named(here), {*named(here)}), named(there))
    for optimizer in (mine, theirs):
        optimizer.step()
        optimizer.zero_grad()
    assert type(theirs) is kind
    for name, parameter in named(there).items():
        assert torch.equal(parameter, named(here)[name])
        assert parameter.grad is None


def test_attributes_travel_and_what_belongs_to_the_driver_does_not() -> None:
    here, there = pair()
    mine = Counting(here.parameters(), lr=0.1)
    StepLR(mine, 1)  # patches `step` on the instance
    mine.register_step_pre_hook(lambda *_: pytest.fail("a hook of the driver"))
    mine.steps[0] = 5
    [theirs] = unship(*ship([mine], named(here), set()), named(there))
    assert isinstance(theirs, Counting)
    theirs.step()
    assert theirs.steps == [6]
    assert theirs.favourite is named(there)["0.weight"]
    assert vars(theirs).keys().isdisjoint({"report", "step"})


def test_only_states_of_the_parameters_that_a_rank_owns_travel() -> None:
    here, there = pair()
    mine = AdamW(here.parameters())
    mine.step()
    [theirs] = unship(*ship([mine], named(here), {"0.bias"}), named(there))
    [(parameter, state)] = theirs.state.items()
    assert parameter is named(there)["0.bias"]
    assert torch.equal(state["exp_avg"], mine.state[named(here)["0.bias"]]["exp_avg"])


def test_large_states_travel_apart_and_are_in_memory_as_they_were() -> None:
    parameter = nn.Parameter(torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last))
    parameter.grad = torch.randn_like(parameter)
    mine = AdamW([parameter])
    mine.step()
    state = mine.state[parameter]
    state["again"] = state["exp_avg"]
    data, apart = ship([mine], {"weight": parameter}, {"weight"})
    assert [id(tensor) for _, tensor in apart] == [id(state["exp_avg"]), id(state["exp_avg_sq"])]
    there = nn.Parameter(torch.empty_like(parameter))
    arriving = ((name, tensor.contiguous()) for name, tensor in apart)
    [theirs] = unship(data, arriving, {"weight": there})
    found = theirs.state[there]
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(found[key], state[key])
        assert found[key].stride() == state[key].stride()
    assert found["again"] is found["exp_avg"]


def test_one_that_steps_whole_is_elsewhere_its_groups_alone() -> None:
    here, there = pair()
    mine = [AdamW(groups(here)), SGD(here.parameters(), lr=0.3)]
    whole, apart = unship(*ship(mine, named(here), {*named(here)}, [True, False]), named(there))
    assert type(whole) is StepsElsewhere
    assert type(apart) is SGD
    assert groups_of(whole, named_in(there)) == groups_of(mine[0], named_in(here))
    whole.zero_grad()
    assert all(parameter.grad is None for parameter in there.parameters())


def test_an_optimizer_of_nothing_travels_too() -> None:
    [theirs] = unship(*ship([Nothing()], {}, set()), {})
    assert theirs.param_groups == []


@pytest.mark.parametrize("kept", [1, 2])
def test_groups_that_are_taken_are_those_of_the_driver(kept: int) -> None:
    here, there = pair()
    mine, theirs = SGD(groups(here), lr=0.1), SGD(groups(there)[:1], lr=0.1)
    theirs.add_param_group(groups(there)[1])
    rate = torch.tensor(0.25)
    mine.param_groups[0] |= {"lr": rate, "nesterov": False}
    del mine.param_groups[kept:], theirs.param_groups[3 - kept :]
    sent = groups_of(mine, named_in(here))
    rate.zero_()  # what was sent is what it was
    take_groups(theirs, sent, named(there))
    assert theirs.param_groups[0]["lr"] == 0.25
    assert theirs.param_groups[0]["params"] == [*there[1].parameters()]  # type: ignore[index]
    assert len(theirs.param_groups) == kept
    assert groups_of(theirs, named_in(there))[1:] == groups_of(mine, named_in(here))[1:]


def test_a_state_dict_in_parts_is_completed_to_that_of_one_device() -> None:
    (here, there), (alone, _) = pair(), pair()
    for name in named(here):  # the second layer is here, the first one on the other rank
        rank = there if name.startswith("1.") else here
        named(rank)[name].grad = None
    mine, theirs, one_device = (AdamW(groups(module)) for module in (here, there, alone))
    for optimizer in (mine, theirs, one_device):
        optimizer.step()
    states = {names(there)[id(p)]: state for p, state in theirs.state.items()}
    found = complete(mine, mine.state_dict(), names(here), states)
    expected = one_device.state_dict()
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
    assert list(found["state"]) == [0, 1, 2, 3]
    assert found["param_groups"] == expected["param_groups"]
