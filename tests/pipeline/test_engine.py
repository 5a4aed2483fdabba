"""A pipeline of two to four stages in one process: its numbers, and what happens when one fails."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from pipelines import Layers, Pipeline
from torch import Tensor, nn

from lightning_hybrid.comm.transport import ConnectionLost
from lightning_hybrid.errors import RemoteError

PLACEMENTS = [(1, 0), (1, 2, 0), (1, 2, 3, 0), (1, 2, 1, 0), (0, 1, 0)]


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layers(nn.Linear(4, 4).double(), nn.Tanh()) for _ in range(count)]


def batch(parts: int = 3, *, requires_grad: bool = False) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(parts)]
    return [[value.requires_grad_(requires_grad)] for value in values]


def one_device(network: Sequence[nn.Module], parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    outputs = []
    for values in parts:
        current = list(values)
        for stage in network:
            current = stage(current, ())
        outputs.append(current[0])
    return outputs


def gradients_of(network: Sequence[nn.Module]) -> list[Tensor]:
    return [parameter.grad for stage in network for parameter in stage.parameters()]  # type: ignore[misc]


def step(pipeline: Pipeline, parts: list[list[Tensor]], **how: bool) -> tuple[list[Tensor], Any]:
    """Forward, then backward of the sum of squares of the outputs."""
    calls = pipeline.open(parts)
    outputs = [values[0] for values in pipeline.forward(calls, parts)]
    return outputs, pipeline.backward(calls, [[2 * o.detach()] for o in outputs], **how)


@pytest.mark.parametrize("devices", PLACEMENTS)
def test_outputs_and_gradients_are_those_of_one_device(devices: tuple[int, ...]) -> None:
    network = stages(len(devices))
    reference = deepcopy(network)
    pipeline, parts = Pipeline(network, devices), batch()
    for _ in range(3):  # with headers, then twice without
        outputs, _ = step(pipeline, parts)
        expected = one_device(reference, parts)
        sum(output.square().sum() for output in expected).backward()  # type: ignore[union-attr]
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected))
    for found, wanted in zip(gradients_of(network), gradients_of(reference)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("devices", PLACEMENTS)
def test_gradients_of_the_inputs_come_back_to_the_driver(devices: tuple[int, ...]) -> None:
    network, parts = stages(len(devices)), batch(requires_grad=True)
    _, found = step(Pipeline(network, devices), parts, input_gradient=True)
    sum(output.square().sum() for output in one_device(network, parts)).backward()  # type: ignore[union-attr]
    for [gradient], [value] in zip(found, parts):
        torch.testing.assert_close(gradient, value.grad, rtol=1e-12, atol=1e-12)


def test_calls_of_other_shapes_exchange_theirs_and_several_may_be_open() -> None:
    network = stages(3)
    pipeline = Pipeline(network, (1, 2, 0))
    batches = [batch(3), batch(1), batch(2)]
    calls = [pipeline.open(parts) for parts in batches]
    for call, parts in zip(calls, batches):
        outputs = [values[0] for values in pipeline.forward(call, parts)]
        assert all(torch.equal(a, b) for a, b in zip(outputs, one_device(network, parts)))
    for call, parts in zip(reversed(calls), reversed(batches)):
        pipeline.backward(call, [[torch.ones(2, 4, dtype=torch.float64)] for _ in parts])
    assert all(gradient is not None for gradient in gradients_of(network))


class Block(nn.Module):
    """Batch statistics and a short cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).relu())


CLOSE = {torch.float64: 1e-10, torch.float32: 1e-6}


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("dtype", CLOSE)
def test_split_backwards_give_the_gradients_of_one_device(stages: int, dtype: torch.dtype) -> None:
    for microbatches in (stages, 2 * stages + 1, 4 * stages):
        torch.manual_seed(microbatches)
        network: list[nn.Module] = [Layers(Block()).to(dtype) for _ in range(stages)]
        reference = deepcopy(network)
        sizes = [3] * (microbatches - 1) + [2]  # the last micro-batch is smaller
        parts = [[torch.randn(size, 4, dtype=dtype)] for size in sizes]
        pipeline = Pipeline(
            network,
            (*range(1, stages), 0),
            schedule="zero_bubble",
            split=range(1, stages),
        )
        for _ in range(2):  # with headers and without
            outputs, _ = step(pipeline, parts)
            expected = one_device(reference, parts)
            sum(output.square().sum() for output in expected).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(outputs, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
        for found, wanted in zip(gradients_of(network), gradients_of(reference)):
            torch.testing.assert_close(
                found / len(parts), wanted / len(parts), rtol=CLOSE[dtype], atol=CLOSE[dtype]
            )


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
    network, failing = stages(count), Failing()
    network[where] = Layers(nn.Linear(4, 4).double(), failing)
    return network, failing


@pytest.mark.parametrize("devices", PLACEMENTS)
@pytest.mark.parametrize("steady", [False, True])
def test_a_stage_that_fails_is_heard_of_and_the_next_call_is_right(
    devices: tuple[int, ...], steady: bool
) -> None:
    for where, device in enumerate(devices):
        network, failing = with_failing(len(devices), where)
        pipeline, parts = Pipeline(network, devices), batch()
        if steady:  # shapes are known: zeros travel in place of the values
            step(pipeline, parts)
        failing.forward = True
        with pytest.raises(ValueError, match="in the forward") as found:
            pipeline.forward(pipeline.open(parts), parts)
        assert isinstance(found.value.__cause__, RemoteError) == (device != 0)
        assert set(pipeline.errors) == {0}
        failing.forward = False
        for engine in pipeline.engines.values():
            engine.failure = None  # as `ForgetFailure` does
        other = batch(2)
        outputs = [values[0] for values in pipeline.forward(pipeline.open(other), other)]
        assert all(torch.equal(a, b) for a, b in zip(outputs, one_device(network, other)))


def test_a_stage_that_fails_in_a_backward_is_heard_of_with_the_next_forward() -> None:
    network, failing = with_failing(3, 0)
    pipeline, parts = Pipeline(network, (1, 2, 0)), batch()
    failing.backward = True
    step(pipeline, parts)
    assert pipeline.engines[1].failure is not None
    with pytest.raises(ValueError, match="in the backward"):
        pipeline.forward(pipeline.open(parts), parts)


@pytest.mark.parametrize("killed", [1, 2])
@pytest.mark.parametrize("steady", [False, True])
def test_a_lost_rank_is_named_by_its_neighbours(killed: int, steady: bool) -> None:
    pipeline, parts = Pipeline(stages(4), (1, 2, 3, 0)), batch()
    if steady:
        step(pipeline, parts)
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
    pipeline, parts = Pipeline(stages(2), (1, 0), timeout_s=0.1), batch()
    calls = pipeline.open(parts)
    with pytest.raises(ConnectionLost, match="rank 1") as found:
        pipeline.engines[0].forward(calls[0], parts)
    assert found.value.late
