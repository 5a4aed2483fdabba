"""A pipeline of two to four stages in one process: its numbers, and what happens when one fails."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
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

from lightning_hybrid.comm.connections import ConnectionLost, start
from lightning_hybrid.errors import HybridError, NetworkError, RemoteError


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


def test_sparse_gradients_of_replicas_are_refused_before_a_step_and_in_training_alone() -> None:
    pipeline, parts = Pipeline(chain(2), (1, 0)), slices()
    weight = nn.Parameter(torch.ones(1))
    pipeline.engines[1].sparse = {"table.weight": weight}
    calls = pipeline.open(parts)
    evaluation = {n: replace(c, key=replace(c.key, grad=False)) for n, c in calls.items()}
    assert len(pipeline.forward(evaluation, parts)) == len(parts)
    weight.requires_grad_(False)
    pipeline.forward(pipeline.open(parts), parts)
    weight.requires_grad_(True)
    with pytest.raises(NetworkError, match=r"'table\.weight' is sparse.* sparse=False"):
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


META = torch.device("meta")


class Companion(nn.Module):
    """A stage that passes a tensor beside its activations: its own, or what it was given."""

    checkpointed = False

    def __init__(self, make: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4, dtype=torch.float64, device=META), make
        self.seen: list[Tensor] = []

    def forward(self, values: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        first, *others = values
        self.seen += others
        first = nn.functional.dropout(self.layer(first))
        return [first, *([self.make(first)] if self.make else others)]


@pytest.mark.parametrize("devices", PLACEMENTS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: torch.arange(3), id="lengths on the CPU"),
        pytest.param(lambda x: torch.rand(3), id="drawn on the CPU"),
        pytest.param(lambda x: x.detach().to(torch.int16), id="int16"),
        pytest.param(lambda x: x.detach().to(torch.complex64), id="complex"),
        pytest.param(lambda x: x.t()[1:], id="in another order"),
        pytest.param(lambda x: x[:0], id="empty"),
    ],
)
def test_on_another_device_what_nccl_refuses_passes_every_stage(
    devices: tuple[int, ...], make: Callable[[Tensor], Tensor]
) -> None:
    """States of generators too. The numbers of this device no host can have read."""
    stages = [Companion(make), *(Companion() for _ in devices[1:])]
    pipeline = Pipeline(stages, devices, device=META)
    parts = [[torch.empty(2, 4, dtype=torch.float64, device=META)] for _ in range(3)]
    for _ in range(2):
        calls = pipeline.open(parts, uses_rng=True)
        outputs = pipeline.forward(calls, parts)
        pipeline.backward(calls, [[2 * first.detach(), None] for first, _ in outputs])
    sent = make(outputs[0][0])
    for stage in stages[1:]:
        assert {(value.device, value.dtype, value.shape) for value in stage.seen} == {
            (sent.device, sent.dtype, sent.shape)
        }
        assert stage.layer.weight.grad is not None
    seen = [stage.seen for stage in stages[1:]]
    if sent.device.type == "cpu":
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen[0], seen[-1]))
        assert torch.equal(seen[0][0], sent) or sent.is_floating_point()


def test_a_tensor_that_the_backend_refuses_ends_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("Tensors must be CUDA and dense")

    pipeline, parts = Pipeline(chain(3), (1, 2, 0), timeout_s=60), slices()
    wire = pipeline.engines[1].owned[0].links.at(0).next._out  # type: ignore[attr-defined]
    monkeypatch.setattr(wire, "send", lambda tensor: start(refuse, [tensor], peer=wire.peer))
    calls = pipeline.open(parts)

    def rank(device: int) -> None:
        try:
            pipeline.engines[device].forward(calls[device], () if device else parts)
        except RuntimeError:
            pipeline.replica.kill(device)  # it leaves, as `World.leave` does
            raise

    with pytest.raises(RuntimeError):
        pipeline.together(rank)
    error = pipeline.errors[1]
    assert type(error) is HybridError
    for word in ("rank 2", "Tensors must be CUDA and dense", "torch.uint8 of shape", "on cpu"):
        assert word in str(error)
    assert {*pipeline.errors} == {0, 1, 2}
