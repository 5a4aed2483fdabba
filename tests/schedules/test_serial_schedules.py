"""The serial models that streamed schedules are compared with, against autograd."""

from copy import deepcopy

import pytest
import torch
from serial_schedules import in_stages, train_serially
from torch import Tensor, nn
from torch.func import functional_call

from lightning_hybrid.schedules import STREAMED

MODES = ("stash", "recompute", "current")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.Tanh())]
    return nn.Sequential(*layers).double()


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(count, 4, 3, dtype=torch.float64))


def mean_square_gradient(output: Tensor) -> Tensor:
    return 2 * output / output.numel()


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_one_stage_is_plain_training(weights: str, kind: type[torch.optim.SGD]) -> None:
    found, expected = network(), network()
    optimizer = kind(expected.parameters(), lr=0.1)
    for batch in batches(5):
        optimizer.zero_grad()
        expected(batch).square().mean().backward()
        optimizer.step()
    mine = kind(found.parameters(), lr=0.1)
    train_serially([found], mine, batches(5), mean_square_gradient, (0,), weights)
    torch.testing.assert_close(dict(found.named_parameters()), dict(expected.named_parameters()))


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("name", ["pipedream", "fdg"])
def test_a_learning_rate_of_zero_gives_backpropagation_of_the_right_batch(
    weights: str, name: str
) -> None:
    found, expected = network(), network()
    ahead = STREAMED[name].look_aheads(3)
    optimizer = torch.optim.SGD(found.parameters(), lr=0.0)
    train_serially(in_stages(found, 3), optimizer, batches(7), mean_square_gradient, ahead, weights)
    expected(batches(7)[-1]).square().mean().backward()
    for mine, theirs in zip(found.parameters(), expected.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", ["pipedream", "fdg"])
def test_stashed_weights_give_the_gradient_of_one_network_of_mixed_ages(name: str) -> None:
    """w(t + 1) = w(t) - rate * gradient of f(w_1 of t - a_1, ..., w_K of t), by autograd."""
    found, now = network(), dict(network().named_parameters())
    ahead = STREAMED[name].look_aheads(3)
    stages = in_stages(found, 3)
    stage_of = {
        name: k
        for k, stage in enumerate(stages)
        for name, p in found.named_parameters()
        if any(p is q for q in stage.parameters())
    }
    history = []
    for t, batch in enumerate(batches(9)):
        history.append(now)
        mixed = {
            n: history[max(0, t - ahead[stage_of[n]])][n].detach().requires_grad_() for n in now
        }
        functional_call(network(), mixed, batch).square().mean().backward()
        now = {n: (now[n] - 0.3 * mixed[n].grad).detach() for n in now}
    optimizer = torch.optim.SGD(found.parameters(), lr=0.3)
    train_serially(stages, optimizer, batches(9), mean_square_gradient, ahead)
    for n, value in found.named_parameters():
        torch.testing.assert_close(value.detach(), now[n], rtol=0, atol=1e-12)


def test_the_three_kinds_of_weights_differ() -> None:
    results = []
    for weights in MODES:
        module = deepcopy(network())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        stages = in_stages(module, 3)
        train_serially(stages, optimizer, batches(9), mean_square_gradient, (2, 1, 0), weights)
        results.append(module[0].weight.detach().clone())
    assert not torch.allclose(results[0], results[1])
    assert not torch.allclose(results[0], results[2])
    assert not torch.allclose(results[1], results[2])
