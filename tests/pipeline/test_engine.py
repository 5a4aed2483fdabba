"""A pipeline of two to four stages in one process: its numbers, and what happens when one fails."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from pipelines import (
    PLACEMENTS,
    Layers,
    Pipeline,
    chain,
    gradients_of,
    one_device,
    slices,
    train_step,
)
from torch import Tensor, nn

from lightning_hybrid.comm.transport import ConnectionLost
from lightning_hybrid.errors import RemoteError


@pytest.mark.parametrize("devices", PLACEMENTS)
def test_outputs_and_gradients_are_those_of_one_device(devices: tuple[int, ...]) -> None:
    network = chain(len(devices))
    reference = deepcopy(network)
    pipeline, parts = Pipeline(network, devices), slices()
    for _ in range(3):  # with headers, then twice without
        outputs, _ = train_step(pipeline, parts)
        expected = one_device(reference, parts)
        sum(output.square().sum() for output in expected).backward()  # type: ignore[union-attr]
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected))
    for found, wanted in zip(gradients_of(network), gradients_of(reference)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class Failing:
    """A layer that fails when it is told to."""

    forward = backward = False

    def __call__(self, value: Tensor) -> Tensor:
        if self.forward:
            raise ValueError("in the forward")
        value = value * 1
        if value.requires_grad:
            value.register_hook(self._hook)
        return value

    def _hook(self, gradient: Tensor) -> None:
        if self.backward:
            raise ValueError("in the backward")


def with_failing(count: int, where: int) -> tuple[list[nn.Module], Failing]:
    network, failing = chain(count), Failing()
    network[where] = Layers(nn.Linear(4, 4).double(), failing)
    return network, failing


@pytest.mark.parametrize("devices", PLACEMENTS)
@pytest.mark.parametrize("steady", [False, True])
def test_a_stage_that_fails_is_heard_of_and_the_next_call_is_right(
    devices: tuple[int, ...], steady: bool
) -> None:
    for where, device in enumerate(devices):
        network, failing = with_failing(len(devices), where)
        pipeline, parts = Pipeline(network, devices), slices()
        if steady:  # shapes are known: zeros travel in place of the values
            train_step(pipeline, parts)
        failing.forward = True
        with pytest.raises(ValueError, match="in the forward") as found:
            pipeline.forward(pipeline.open(parts), parts)
        assert isinstance(found.value.__cause__, RemoteError) == (device != 0)
        assert set(pipeline.errors) == {0}
        failing.forward = False
        for engine in pipeline.engines.values():
            engine.failure = None  # as `ForgetFailure` does
        other = slices(2)
        outputs = [values[0] for values in pipeline.forward(pipeline.open(other), other)]
        assert all(torch.equal(a, b) for a, b in zip(outputs, one_device(network, other)))


def test_a_stage_that_fails_in_a_backward_is_heard_of_with_the_next_forward() -> None:
    network, failing = with_failing(3, 0)
    pipeline, parts = Pipeline(network, (1, 2, 0)), slices()
    failing.backward = True
    train_step(pipeline, parts)
    assert pipeline.engines[1].failure is not None
    with pytest.raises(ValueError, match="in the backward"):
        pipeline.forward(pipeline.open(parts), parts)


@pytest.mark.parametrize("killed", [1, 2])
@pytest.mark.parametrize("steady", [False, True])
def test_a_lost_rank_is_named_by_its_neighbours(killed: int, steady: bool) -> None:
    pipeline, parts = Pipeline(chain(4), (1, 2, 3, 0)), slices()
    if steady:
        train_step(pipeline, parts)
    calls = pipeline.open(parts)

    def rank(device: int) -> Any:
        if device == killed:
            pipeline.replica.kill(killed)
            return None
        try:
            return pipeline.engines[device].forward(calls[device], () if device else parts)
        except ConnectionLost:
            pipeline.replica.kill(device)  # its process ends
            raise

    with pytest.raises(ConnectionLost):
        pipeline.together(rank)
    lost = {error.peer for error in pipeline.errors.values() if isinstance(error, ConnectionLost)}
    assert f"rank {killed}" in lost
    # a rank before it may have sent everything already; it hears of it with the next command
    assert {0, *range(killed + 1, 4)} <= set(pipeline.errors)


def test_a_rank_that_does_not_answer_is_late() -> None:
    pipeline, parts = Pipeline(chain(2), (1, 0), timeout_s=0.1), slices()
    calls = pipeline.open(parts)
    with pytest.raises(ConnectionLost, match="rank 1") as found:
        pipeline.engines[0].forward(calls[0], parts)
    assert found.value.late
