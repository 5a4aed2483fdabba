"""Backward passes: gradients of inputs, and backwards in two parts."""

from copy import deepcopy

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


@pytest.mark.parametrize("devices", PLACEMENTS)
def test_gradients_of_the_inputs_come_back_to_the_driver(devices: tuple[int, ...]) -> None:
    network, parts = chain(len(devices)), slices(requires_grad=True)
    _, found = train_step(Pipeline(network, devices), parts, input_gradient=True)
    sum(output.square().sum() for output in one_device(network, parts)).backward()  # type: ignore[union-attr]
    for [gradient], [value] in zip(found, parts):
        torch.testing.assert_close(gradient, value.grad, rtol=1e-12, atol=1e-12)


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
            outputs, _ = train_step(pipeline, parts)
            expected = one_device(reference, parts)
            sum(output.square().sum() for output in expected).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(outputs, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
        for found, wanted in zip(gradients_of(network), gradients_of(reference)):
            torch.testing.assert_close(
                found / len(parts), wanted / len(parts), rtol=CLOSE[dtype], atol=CLOSE[dtype]
            )
