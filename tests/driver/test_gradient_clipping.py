"""Gradients of all stages are clipped and unscaled as one device does it."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import TrainedBeside, gradients
from torch import nn

from lightning_hybrid.comm.protocol import GiveFailure

DEVICES = [(1, 0), (1, 2, 0)]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_gradients_are_clipped_by_their_common_norm(
    replicas: Any, devices: tuple[int, ...], order: float
) -> None:
    trained = TrainedBeside(replicas, devices)
    norm = trained.clipping.clip_norm(trained.mine, 0.01, order)
    expected = nn.utils.clip_grad_norm_(trained.reference.parameters(), 0.01, order)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    trained.assert_same_gradients()


def test_a_norm_that_must_be_finite_and_is_not_leaves_gradients_as_they_are(
    replicas: Any,
) -> None:
    trained = TrainedBeside(replicas, (1, 0))
    before = gradients(trained.module)
    trained.replica.modules[1].get_parameter("net.0.bias").grad[0] = torch.inf
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 for gradients is inf"):
        trained.clipping.clip_norm(trained.mine, 0.01, finite=True)
    [*finite] = zip(gradients(trained.module)[2:], before[2:], strict=True)
    assert all(torch.equal(now, then) for now, then in finite)


def test_gradients_are_clamped_on_all_ranks(replicas: Any) -> None:
    trained = TrainedBeside(replicas, (1, 2, 0))
    trained.clipping.clip_values(trained.mine, 0.001)
    nn.utils.clip_grad_value_(trained.reference.parameters(), 0.001)
    trained.assert_same_gradients()


def test_unscaled_gradients_are_not_those_that_were_read_before(replicas: Any) -> None:
    trained = TrainedBeside(replicas, (1, 0))
    before = gradients(trained.module)
    assert not trained.clipping.unscale(trained.mine, torch.tensor(0.5, dtype=torch.float64))
    assert all(torch.equal(a, b / 2) for a, b in zip(gradients(trained.module), before))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gradient_that_is_not_finite_is_found_wherever_it_is(replicas: Any, rank: int) -> None:
    trained = TrainedBeside(replicas, (1, 0))
    trained.replica.driver.commands.ask(GiveFailure())  # the worker has its gradients
    worker = trained.replica.modules[1]
    bias = {0: trained.module.net[-2].bias, 1: worker.get_parameter("net.0.bias")}[rank]
    bias.grad[0] = torch.inf
    assert trained.clipping.unscale(trained.mine, torch.tensor(0.5, dtype=torch.float64))


def test_a_copy_of_what_lightning_holds_speaks_to_the_same_workers(replicas: Any) -> None:
    trained = TrainedBeside(replicas, (1, 0))
    patched = {"clip_grad_by_norm": trained.clipping.clip_norm}
    assert deepcopy(patched)["clip_grad_by_norm"].__self__ is trained.clipping
