"""Proxies of tensors of another rank, which here is an ordinary copy of the module."""

import copy
import io
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.errors import HybridError
from lightning_hybrid.tensors.kind import Kind
from lightning_hybrid.tensors.remote import RemoteTensors


class Owner:
    """The rank that owns the tensors; counts what it is asked for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = dict(module.named_parameters())
        self.tensors = self.parameters | dict(module.named_buffers())
        self.given: list[list[str]] = []

    def give(self, kind: Kind, names: list[str]) -> Mapping[str, Tensor]:
        self.given.append(names)
        if kind is Kind.GRADIENT:
            return {n: self.parameters[n].grad.clone() for n in names}  # type: ignore[union-attr]
        return {n: self.tensors[n].detach().clone() for n in names}

    def take(self, kind: Kind, values: Mapping[str, Tensor], *, add: bool = False) -> None:
        for name, value in values.items():
            if kind is not Kind.GRADIENT:
                self.tensors[name].data.copy_(value)
            elif add and self.parameters[name].grad is not None:
                self.parameters[name].grad += value  # type: ignore[operator]
            else:
                self.parameters[name].grad = value.clone()

    def clear_gradients(self, names: list[str]) -> None:
        for name in names:
            self.parameters[name].grad = None

    def gradient_names(self) -> set[str]:
        return {name for name, p in self.parameters.items() if p.grad is not None}


class World:
    """A module on this rank whose tensors live in another one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.here = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.there = copy.deepcopy(self.here)
        with torch.no_grad():
            for tensor in self.there.parameters():
                tensor += 1
        self.owner = Owner(self.there)
        self.remote = RemoteTensors(self.owner)
        names = [n for n, _ in self.here.named_parameters()]
        names += [n for n, _ in self.here.named_buffers()]
        self.remote.add(self.here, names)

    def backward_there(self) -> None:
        self.there(torch.randn(5, 3)).square().sum().backward()
        self.remote.outdate(Kind.GRADIENT, Kind.BUFFER)

    def same(self) -> bool:
        self.remote.flush()
        mine, theirs = self.here.state_dict(), self.there.state_dict()
        return all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.fixture
def world() -> World:
    return World()


def test_a_parameter_stays_the_same_object_and_its_looks_ask_nobody(world: World) -> None:
    weight = world.here[0].weight
    optimizer = torch.optim.SGD(world.here.parameters(), lr=1.0)
    assert isinstance(weight, nn.Parameter)
    assert optimizer.param_groups[0]["params"][0] is weight
    assert weight.shape == (4, 3)
    assert weight.requires_grad
    assert weight.numel() == 12
    weight.requires_grad_(False)
    assert world.owner.given == []


def test_statistics_that_batch_normalisation_writes_here_reach_the_owner(world: World) -> None:
    expected = copy.deepcopy(world.there)
    x = torch.randn(5, 3)
    world.here(x)
    expected(x)
    world.remote.flush()
    assert torch.equal(world.there[1].running_mean, expected[1].running_mean)
    assert torch.equal(world.there[1].running_var, expected[1].running_var)


def test_reading_shows_what_the_owner_has(world: World) -> None:
    assert torch.equal(world.here[0].weight.sum(), world.there[0].weight.sum())
    assert world.owner.given == [["0.weight"]]
    world.here[0].weight.mean()
    assert len(world.owner.given) == 1
    world.here[0].bias.mean()  # with the second all the others come
    assert len(world.owner.given[1]) == 5
    with torch.no_grad():
        world.there[0].weight.mul_(2)
    world.remote.outdate(Kind.PARAMETER)
    assert torch.equal(world.here[0].weight.norm(), world.there[0].weight.norm())


def test_a_constant_that_is_here_too_is_not_fetched_but_its_changes_travel(world: World) -> None:
    world.remote.add(world.here, [], ["1.running_mean"])
    for _ in range(2):
        world.remote.outdate(Kind.BUFFER)
        world.here[1].running_mean.sum()
    assert world.owner.given == []
    world.here[1].running_mean.fill_(7.0)
    world.remote.flush()
    assert (world.there[1].running_mean == 7.0).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.clamp_(-0.1, 0.1),
        lambda p: p.data.mul_(0.5),
        lambda p: p.detach().mul_(0.5),
        lambda p: p.data.view(-1)[1].fill_(7.0),
        lambda p: p.view(-1).add_(1.0),
        lambda p: p.copy_(torch.zeros_like(p)),
        lambda p: setattr(p, "data", torch.ones(4, 3)),
        lambda p: nn.init.constant_(p, 3.0),
        lambda p: torch._foreach_mul_([p], 3.0),
        lambda p: p.__setitem__(0, 5.0),
    ],
)
def test_changes_in_place_reach_the_owner(world: World, change: object) -> None:
    before = world.there[0].weight.clone()
    with torch.no_grad():
        change(world.here[0].weight)  # type: ignore[operator]
    assert world.same()
    assert not torch.equal(world.there[0].weight, before)


def test_a_view_kept_from_before_an_update_is_refused_not_lost(world: World) -> None:
    with torch.no_grad():
        view = world.here[0].weight.requires_grad_(False).unbind(0)[0]
        world.remote.outdate(Kind.PARAMETER)
        view.zero_()
    with pytest.raises(HybridError, match=r"A view of parameter '0\.weight'.*Take the view anew"):
        world.remote.flush()


def test_replaced_buffers_reach_the_owner_and_replaced_parameters_are_refused(
    world: World,
) -> None:
    norm = world.here[1]
    norm.running_mean = torch.full((4,), 2.0)
    norm.num_batches_tracked *= 0
    world.remote.adopt_replaced()
    assert world.same()
    assert world.there[1].running_mean.tolist() == [2.0] * 4  # type: ignore[union-attr,operator]
    other = World()
    other.here[0].weight = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(HybridError, match=r"parameter '0\.weight' was replaced"):
        other.remote.adopt_replaced()


def test_gradients_are_seen_changed_and_cleared(world: World) -> None:
    assert world.here[0].weight.grad is None
    world.backward_there()
    mine, theirs = list(world.here.parameters()), list(world.there.parameters())
    assert all(torch.equal(a.grad + 0, b.grad) for a, b in zip(mine, theirs))  # type: ignore[operator,arg-type]
    expected = nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None])
    norm = nn.utils.clip_grad_norm_(world.here.parameters(), 0.1)
    world.remote.flush()
    assert torch.equal(norm, expected)
    clipped = nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None])
    assert clipped == pytest.approx(0.1, rel=1e-4)
    mine[0].grad = torch.ones(4, 3)
    assert mine[0].grad.sum() == 12
    world.remote.flush()
    assert torch.equal(theirs[0].grad, torch.ones(4, 3))  # type: ignore[arg-type]
    world.here.zero_grad()
    assert mine[0].grad is None
    world.remote.flush()
    assert all(p.grad is None for p in theirs)


def test_gradients_are_changed_in_place_and_swapped(world: World) -> None:
    world.backward_there()
    first, last = world.here[0].bias, world.here[1].bias
    old, theirs = world.there[0].bias.grad.clone(), world.there[1].bias.grad.clone()  # type: ignore[union-attr]
    first.grad *= 3
    world.remote.flush()
    assert torch.equal(world.there[0].bias.grad, old * 3)  # type: ignore[arg-type]
    first.grad = last.grad
    world.remote.flush()
    assert torch.equal(world.there[0].bias.grad, theirs)  # type: ignore[arg-type]


def test_clearing_gradients_fetches_none(world: World) -> None:
    world.backward_there()
    world.here.zero_grad()
    world.remote.flush()
    assert world.owner.given == []
    assert all(p.grad is None for p in world.there.parameters())


def test_a_penalty_adds_its_gradient_to_the_owners(world: World) -> None:
    world.backward_there()
    before = [p.grad.clone() for p in world.there.parameters()]  # type: ignore[union-attr]
    penalty = sum(p.square().sum() for p in world.here.parameters())
    assert world.remote.in_graph
    penalty.backward()  # type: ignore[union-attr]
    gradients = [p.grad + 0 for p in world.here.parameters()]  # type: ignore[operator]
    for seen, old, theirs in zip(gradients, before, world.there.parameters()):
        assert torch.equal(seen, old + 2 * theirs)
        assert torch.equal(theirs.grad, seen)  # type: ignore[arg-type]


def test_copies_and_pickles_are_ordinary_and_current(world: World) -> None:
    copied = copy.deepcopy(world.here)
    assert type(copied[0].weight) is nn.Parameter
    assert type(copied[1].running_mean) is Tensor
    assert torch.equal(copied[0].weight, world.there[0].weight)
    file = io.BytesIO()
    torch.save(world.here.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert all(torch.equal(saved[n], t) for n, t in world.there.state_dict().items())
    assert all(type(t) is Tensor for t in saved.values())


def test_a_state_dict_taken_earlier_shows_what_is_true_now(world: World) -> None:
    state = world.here.state_dict()
    with torch.no_grad():
        world.there[0].weight.zero_()
    world.remote.outdate(Kind.PARAMETER)
    assert state["0.weight"].abs().sum() == 0


def test_loading_a_state_dict_reaches_the_owner(world: World) -> None:
    other = World().here.state_dict()
    world.here.load_state_dict({name: t.clone() + 1 for name, t in other.items()})
    assert world.same()


def test_suspended_proxies_are_ordinary_tensors_and_come_back(world: World) -> None:
    with world.remote.suspended():
        assert type(world.here[0].weight) is nn.Parameter
        assert type(world.here[1].running_mean) is Tensor
    assert world.here[0].weight.sum() == world.there[0].weight.sum()


def test_under_inference_mode_values_are_current_too(world: World) -> None:
    world.backward_there()
    with torch.inference_mode():
        assert world.here[0].weight.sum() == world.there[0].weight.sum()
        assert world.here[0].weight.grad.sum() == world.there[0].weight.grad.sum()  # type: ignore[union-attr]
    with torch.no_grad():
        world.here[0].weight.add_(1.0)
    assert world.same()
