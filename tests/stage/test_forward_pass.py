"""Forward passes: what they tell each other about what comes."""

import gc
import weakref

import torch
from pipelines import Layers, Pipeline, chain, gradients_of, one_device, slices, train_step
from torch import Tensor, nn


def test_calls_of_other_shapes_exchange_theirs_and_several_may_be_open() -> None:
    network = chain(3)
    pipeline = Pipeline(network, (1, 2, 0))
    batches = [slices(3), slices(1), slices(2)]
    calls = [pipeline.open(parts) for parts in batches]
    for call, parts in zip(calls, batches):
        outputs = [values[0] for values in pipeline.forward(call, parts)]
        assert all(torch.equal(a, b) for a, b in zip(outputs, one_device(network, parts)))
    for call, parts in zip(reversed(calls), reversed(batches)):
        pipeline.backward(call, [[torch.ones(2, 4, dtype=torch.float64)] for _ in parts])
    assert all(gradient is not None for gradient in gradients_of(network))


class Residual(nn.Linear):
    """Nothing saves what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_outputs_are_free_before_the_backward_once_the_caller_has_dropped_them() -> None:
    network = [Layers(Residual(4, 4).double()) for _ in range(2)]
    pipeline, parts = Pipeline(network, (1, 0)), slices(3)
    calls = pipeline.open(parts)
    outputs = pipeline.forward(calls, parts)
    gradients = [[2 * output.detach()] for [output] in outputs]
    alive = [weakref.ref(output) for [output] in outputs]
    del outputs
    gc.collect()
    assert not any(output() is not None for output in alive)
    pipeline.backward(calls, gradients)
    found = [gradient.clone() for gradient in gradients_of(network)]
    for stage in network:
        stage.zero_grad()
    sum(output.square().sum() for output in one_device(network, parts)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(found, gradients_of(network), rtol=1e-12, atol=1e-12)


def test_sent_gradients_are_free_when_the_next_forward_begins() -> None:
    pipeline, parts = Pipeline(chain(3), (1, 2, 0)), slices(4)
    train_step(pipeline, parts)
    pipeline.forward(pipeline.open(parts), parts)
    links = [link for e in pipeline.engines.values() for own in e.owned for link in own.links]
    assert len(links) == 3
    assert not any(getattr(link.previous, "_sent") for link in links)  # noqa: B009
