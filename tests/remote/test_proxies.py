"""Proxies of tensors of another rank: what is read, changed and replaced."""

import copy
import io

import pytest
import torch
from owned_elsewhere import World
from torch import Tensor, nn

from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote.hollow_network import NoMemory
from lightning_hybrid.remote.proxy import RemoteKind


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
    world.remote.outdate(RemoteKind.PARAMETER)
    assert torch.equal(world.here[0].weight.norm(), world.there[0].weight.norm())


def test_a_constant_that_is_here_too_is_not_fetched_but_its_changes_travel(world: World) -> None:
    world.remote.add(world.here, [], ["1.running_mean"])
    for _ in range(2):
        world.remote.outdate(RemoteKind.BUFFER)
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
        world.remote.outdate(RemoteKind.PARAMETER)
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
    world.remote.outdate(RemoteKind.PARAMETER)
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


def test_at_the_end_the_gradients_that_are_left_come_here(world: World) -> None:
    dense, sparse = torch.full((4, 3), 2.0), torch.eye(2, 4).to_sparse()
    world.there[0].weight.grad, world.there[2].weight.grad = dense.clone(), sparse.clone()
    weight = world.here[0].weight
    kept = weight.grad
    world.remote.leave_gradients({"0.weight": dense.clone(), "2.weight": sparse})
    world.remote.close()
    assert torch.equal(weight.grad, dense)
    assert torch.equal(kept + 0, dense)
    assert torch.equal(world.here[2].weight.grad.to_dense(), sparse.to_dense())
    assert world.here[2].bias.grad is None
    assert world.there[0].weight.grad is None


# ---------------------------------------------------------------- places in the module


def test_names_are_told_by_kind(world: World) -> None:
    remote = world.remote
    assert remote.names(RemoteKind.PARAMETER) == {n for n, _ in world.here.named_parameters()}
    assert remote.names(RemoteKind.BUFFER) == {n for n, _ in world.here.named_buffers()}
    assert remote.names() == set(world.here.state_dict())


def test_a_replaced_buffer_is_a_proxy_and_is_sent(world: World) -> None:
    world.here[1].running_mean = torch.zeros(4)
    world.remote.adopt_replaced()
    assert type(world.here[1].running_mean) is not Tensor
    assert world.same()


def test_what_was_replaced_before_what_is_refused_is_sent(world: World) -> None:
    world.here[1].running_mean = torch.zeros(4)
    world.here[1].running_var = None
    with pytest.raises(HybridError, match=r"buffer '1\.running_var' was replaced by NoneType"):
        world.remote.adopt_replaced()
    world.remote.flush()
    assert torch.equal(world.there[1].running_mean, torch.zeros(4))


def test_suspended_proxies_are_ordinary_tensors(world: World) -> None:
    weight = world.here[0].weight
    with world.remote.suspended():
        assert type(weight) is nn.Parameter
        world.here[1].running_mean = torch.zeros(4)
    assert type(weight) is not nn.Parameter
    assert type(world.here[1].running_mean) is Tensor  # which `adopt_replaced` finds


def test_tensors_are_unreadable_for_a_while(world: World) -> None:
    weight, before = world.here[0].weight, world.there[0].weight.clone()
    with world.remote.unreadable(), pytest.raises(NoMemory):
        weight.sum()
    assert torch.equal(weight, before)


def test_after_the_end_everything_is_ordinary(world: World) -> None:
    view = world.here[0].weight.data
    world.remote.close()
    assert type(view) is Tensor
    assert all(type(p) is nn.Parameter for p in world.here.parameters())
    assert not world.remote.names()
