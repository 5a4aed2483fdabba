"""Forward passes: what they tell each other about what comes."""

import torch
from pipelines import Pipeline, chain, gradients_of, one_device, slices


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
