"""Whatever the order of pushes: none is lost, none is too old, and all are replayed serially."""

import random
import time
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from lightning_hybrid.parts.asynchronous import ParameterServer, Push

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
PUSHES = 12


def optimizer() -> SGD:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator, dtype=torch.float64) for size in ((3, 2), 4)]
    return SGD([*map(Parameter, weights)], **OPTIONS)


def parameters(of: SGD) -> list[Parameter]:
    return list(of.param_groups[0]["params"])


def gradient(read: Tensor, replica: int, push: int) -> Tensor:
    """Of a loss of these weights that each batch has another one of."""
    return torch.sin(read * (1 + replica)) + push


def has_both(replica: int, push: int) -> bool:
    """Whether the second parameter has a gradient in a batch."""
    return (replica + push) % 3 > 0


def train(home: ParameterServer, replicas: int, seed: int) -> Tensor:
    """Each replica pushes for each of its batches in a thread, and comes to the fence.

    Returns:
        The weights that replica 0 finds there.
    """
    ends: dict[int, Tensor] = {}

    def run(replica: int) -> None:
        dice = random.Random(replicas * seed + replica)
        read = torch.cat([p.detach().flatten() for p in parameters(optimizer())])
        for push in range(PUSHES):
            time.sleep(dice.choice([0, 0, 0, 0.002]))
            flags = torch.tensor([1.0, has_both(replica, push), 1.0], dtype=torch.float64)
            read = home.take(replica, torch.cat([gradient(read, replica, push), flags]))
        ends[replica] = home.take(replica, torch.zeros(13, dtype=torch.float64))

    threads = [Thread(target=run, args=(replica,), daemon=True) for replica in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(torch.equal(end, ends[0]) for end in ends.values())
    return ends[0]


def replay(order: list[Push], replicas: int) -> Tensor:
    """The weights of one process with plain torch."""
    own = optimizer()
    versions = [torch.cat([p.detach().flatten() for p in parameters(own)])]
    for version in range(1 + order[-1][0]):
        own.zero_grad()
        for _, replica, push, read in (each for each in order if each[0] == version):
            whole = gradient(versions[read], replica, push) / replicas
            for number, (p, part) in enumerate(zip(parameters(own), whole.split([6, 4]))):
                if number == 0 or has_both(replica, push):
                    part = part.view_as(p)
                    p.grad = part.clone() if p.grad is None else p.grad + part
        own.step()
        versions.append(torch.cat([p.detach().flatten() for p in parameters(own)]))
    return versions[-1]


@pytest.mark.parametrize("bound", [0, 1, 3, 1000])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_every_push_is_applied_once_within_the_bound_and_as_in_a_replay(
    replicas: int, bound: int
) -> None:
    order: list[Push] = []
    home = ParameterServer(replicas, bound, order.append)
    theirs = optimizer()
    home.load(theirs)
    weights = train(home, replicas, seed=bound)
    pushed = [(replica, push) for _, replica, push, _ in order]
    assert sorted(pushed) == [(r, push) for r in range(replicas) for push in range(PUSHES)]
    assert all(0 <= version - read <= bound for version, _, _, read in order)
    if bound == 0:
        assert [push for _, push in pushed] == sorted(push for _, push in pushed)
    torch.testing.assert_close(weights, replay(order, replicas), rtol=1e-12, atol=1e-12)


def test_a_replica_that_stalls_holds_the_others_up_only_at_the_bound() -> None:
    order: list[Push] = []
    home = ParameterServer(2, 3, order.append)
    home.load(optimizer())
    message = torch.ones(13, dtype=torch.float64)
    for _ in range(3):
        home.take(1, message)
    fourth = Thread(target=home.take, args=(1, message), daemon=True)
    fourth.start()
    fourth.join(timeout=0.2)
    assert fourth.is_alive()
    home.take(0, message)  # all that is held is one update
    fourth.join(timeout=60)
    assert order == [(0, 1, 0, 0), (1, 1, 1, 1), (2, 1, 2, 2), (3, 0, 0, 0), (3, 1, 3, 3)]


def test_states_and_weights_written_at_a_fence_are_gone_on_from() -> None:
    message, fence = torch.ones(13, dtype=torch.float64), torch.zeros(13, dtype=torch.float64)
    home, theirs = ParameterServer(1, 0, lambda push: None), optimizer()
    home.load(theirs)
    for _ in range(3):
        home.take(0, message)
    home.take(0, fence)
    home.give_state()
    expected = optimizer()
    for step in range(6):
        if step == 3:
            for p in parameters(theirs) + parameters(expected):
                p.data.fill_(0.5)  # as a hook does on all replicas
            theirs.param_groups[0]["lr"] = expected.param_groups[0]["lr"] = 0.3
        for p in parameters(expected):
            p.grad = torch.ones_like(p)
        expected.step()
    home.load(theirs)
    for _ in range(3):
        weights = home.take(0, message)
    after = torch.cat([p.detach().flatten() for p in parameters(expected)])
    torch.testing.assert_close(weights, after, rtol=1e-12, atol=1e-12)


def test_an_error_wakes_all_who_wait() -> None:
    home, raised = ParameterServer(2, 0, lambda push: None), list[str]()
    home.load(optimizer())

    def wait() -> None:
        try:
            home.take(0, torch.ones(13, dtype=torch.float64))
        except ValueError as error:
            raised.append(str(error))

    thread = Thread(target=wait, daemon=True)
    thread.start()
    home.end(ValueError("lost"))
    home.end(ValueError("a later one"))
    thread.join(timeout=60)
    assert raised == ["lost"]
