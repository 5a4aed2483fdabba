"""Gradients of parameters of another rank: seen, changed, cleared, and added to."""

import pytest
import torch
from owned_elsewhere import World
from torch import nn

from lightning_hybrid.errors import DeferredError, NetworkError
from lightning_hybrid.remote.deferred import offload


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


@pytest.mark.parametrize("read", [True, False])
def test_who_keeps_a_gradient_that_is_cleared_keeps_its_values(world: World, read: bool) -> None:
    world.backward_there()
    kept, before = world.here[0].weight.grad, world.there[0].weight.grad.clone()  # type: ignore[union-attr]
    assert kept is not None
    if read:
        kept.sum()
    world.here.zero_grad()
    world.remote.flush()
    world.backward_there()
    now = world.there[0].weight.grad.clone()  # type: ignore[union-attr]
    assert torch.equal(world.here[0].weight.grad + 0, now)  # type: ignore[operator]
    assert torch.equal(kept + 0, before)
    kept.mul_(2)
    assert torch.equal(kept + 0, before * 2)
    world.remote.flush()
    assert torch.equal(world.there[0].weight.grad, now)  # type: ignore[arg-type]


def test_gradients_are_exchanged_and_put_back(world: World) -> None:
    world.backward_there()
    first, last = world.there[0].bias.grad.clone(), world.there[1].bias.grad.clone()  # type: ignore[union-attr]
    here, there = world.here[0].bias, world.here[1].bias
    kept = here.grad
    here.grad = there.grad
    there.grad = kept
    world.remote.flush()
    assert torch.equal(world.there[0].bias.grad, last)  # type: ignore[arg-type]
    assert torch.equal(world.there[1].bias.grad, first)  # type: ignore[arg-type]
    kept, here.grad = here.grad, None
    here.grad = kept
    world.remote.flush()
    assert torch.equal(world.there[0].bias.grad, last)  # type: ignore[arg-type]


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


def test_gradients_that_autograd_makes_as_parts_of_one_tensor_are_added_to(world: World) -> None:
    torch.cat([p.flatten() for p in world.here.parameters()]).square().sum().backward()
    world.remote.flush()
    world.remote.gradients.refuse_parts()  # as the next backward does
    for theirs in world.there.parameters():
        assert torch.equal(theirs.grad, 2 * theirs)  # type: ignore[arg-type]


def test_an_assigned_part_is_refused_by_a_backward_until_it_is_cleared(world: World) -> None:
    world.here[0].bias.grad = torch.ones(8)[:4]
    world.remote.flush()
    with pytest.raises(NetworkError, match=r"'0\.bias' was made a part of a larger tensor"):
        world.remote.gradients.refuse_parts()
    world.remote.release_gradients(["0.weight", "0.bias"])  # as `optimizer.zero_grad()` does
    world.remote.gradients.refuse_parts()


def test_a_part_that_was_a_gradient_before_its_parameter_moved_is_refused_by_a_backward() -> None:
    def one_tensor(module: nn.Sequential) -> None:
        module[0].bias.grad = torch.ones(8)[:4]

    world = World(one_tensor)
    world.remote.flush()
    with pytest.raises(NetworkError, match=r"'0\.bias' was made a part of a larger tensor"):
        world.remote.gradients.refuse_parts()


def test_gradients_of_what_is_whole_on_no_rank_are_cleared_and_not_read(world: World) -> None:
    later = nn.Linear(3, 4)
    world.owner.parameters["later.weight"] = theirs = nn.Parameter(torch.zeros(4, 3))
    offload(later.weight, "later.weight", "on device 0")
    gradients = world.remote.gradients
    later.weight._gradients = gradients  # type: ignore[attr-defined]
    assert later.weight.grad is None
    theirs.grad = torch.ones(4, 3)
    world.backward_there()
    found = later.weight.grad
    assert found is not None
    assert found.shape == (4, 3)
    for read in (found.norm, lambda: nn.utils.clip_grad_norm_(later.parameters(), 1.0)):
        with pytest.raises(DeferredError, match=r"'later\.weight\.grad' is on device 0"):
            read()
    with pytest.raises(DeferredError, match=r"'later\.weight\.grad' is on device 0"):
        later.weight.grad = torch.zeros(4, 3)
    later.zero_grad()
    assert theirs.grad is None
    assert later.weight.grad is None
    assert world.here[0].weight.grad is not None  # beside a network that is a proxy's
    world.remote.close()
    assert later.cpu().weight.grad is not None
