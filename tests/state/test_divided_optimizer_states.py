"""Ranks that divide states do together what each of them would do alone, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import gloo_groups, together
from torch import Tensor, nn

from lightning_hybrid.errors import HybridError
from lightning_hybrid.state.divided_optimizer_states import OtherReplicas, StateShares

KINDS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def give_gradients(module: nn.Module, step: int) -> None:
    """As after an average: the same on all ranks. One weight has none at first."""
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(module.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = None if number == 2 and step < 2 else gradient


def divided(names: dict[int, str]) -> dict[str, int]:
    """By name, the one of two replicas that has the state."""
    return {name: number % 2 for number, name in enumerate(names.values())}


def names_of(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_shares_differ_by_no_more_than_the_largest_parameter(replicas: int) -> None:
    generator = torch.Generator().manual_seed(replicas)
    sizes = {
        f"p{n}": int(size)
        for n, size in enumerate(torch.randint(1, 1000, (40,), generator=generator))
    }
    others = OtherReplicas({}, 0, replicas)
    others.divide(1, sizes)
    found = dict(others.replica_of)
    assert found.keys() == sizes.keys()
    loads = [sum(sizes[n] for n, r in found.items() if r == k) for k in range(replicas)]
    assert max(loads) - min(loads) <= max(sizes.values())
    others.divide(0, {"of another rank": 5})
    others.divide(1, {**sizes, "later": 10_000})
    found |= {"of another rank": 0, "later": loads.index(min(loads))}
    assert others.replica_of == found


@pytest.mark.parametrize("kind", KINDS)
def test_each_state_is_on_one_rank_and_the_weights_are_those_of_one(kind: Any) -> None:
    # made here: ranks that are threads share the generator that draws weights
    groups, alone, modules = gloo_groups(60), network(), (network(), network())
    wanted = kind(alone.parameters())

    def train(rank: int) -> tuple[nn.Module, set[str]]:
        module = modules[rank]
        optimizer, names = kind(module.parameters()), names_of(module)
        shares = StateShares(groups[rank], names, divided(names))
        for step in range(4):
            give_gradients(module, step)
            before = [parameter.grad for parameter in module.parameters()]
            versions = [parameter._version for parameter in module.parameters()]
            with shares.alone(optimizer):
                optimizer.step()
            shares.exchange()
            for parameter, gradient, version in zip(module.parameters(), before, versions):
                assert parameter.grad is gradient
                # autograd hears of the change, as of every step
                assert (parameter._version > version) == (gradient is not None)
        return module, {names[id(parameter)] for parameter in optimizer.state}

    for step in range(4):
        give_gradients(alone, step)
        wanted.step()
    (first, mine), (second, theirs) = together(lambda: train(0), lambda: train(1))
    assert not mine & theirs
    assert mine | theirs == {*dict(alone.named_parameters())}
    for module in (first, second):
        for parameter, expected in zip(module.parameters(), alone.parameters(), strict=True):
            assert torch.equal(parameter, expected)


def test_a_rank_whose_step_fails_keeps_nobody_waiting() -> None:
    groups, modules = gloo_groups(60), (network(), network())

    def step(rank: int) -> list[Tensor]:
        module = modules[rank]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        names = names_of(module)
        shares = StateShares(groups[rank], names, divided(names))
        give_gradients(module, 2)
        with shares.alone(optimizer):
            if rank:
                optimizer.step()
        shares.exchange()
        return [parameter.detach() for parameter in module.parameters()]

    first, second = together(lambda: step(0), lambda: step(1))
    assert all(map(torch.equal, first, second))


def test_what_one_replica_alone_knows_it_steps_by_itself() -> None:
    groups, modules = gloo_groups(60), (network(), network())

    def step(rank: int) -> float:
        module, extra = modules[rank], nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([*module.parameters(), extra], lr=1.0)
        names = names_of(module)
        shares = StateShares(groups[rank], names, divided(names))
        extra.grad = torch.tensor(float(rank))
        with shares.alone(optimizer):
            optimizer.step()
        shares.exchange()
        return extra.item()

    assert together(lambda: step(0), lambda: step(1)) == [0.0, -1.0]


def test_states_of_other_replicas_are_refused_by_name() -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    others = OtherReplicas(names_of(module), 0, 2)
    others.replica_of.update({"0.weight": 0, "0.bias": 1})
    assert [others.have(p) for p in module.parameters()][:3] == [False, True, False]
    others.refuse(module[0].weight)
    with pytest.raises(HybridError, match=r"'0.bias' is on replica 1, and this is replica 0"):
        others.refuse(module[0].bias)
    with pytest.raises(HybridError, match=r"SGD.state_dict\(\) would have the states of replica 0"):
        others.refuse_alone(optimizer)
    with others.gathered():
        others.refuse_alone(optimizer)
