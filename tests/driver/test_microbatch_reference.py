"""A call in micro-batches is the concatenation of the calls of its parts."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.driver.found_network import call_in_chunks
from lightning_hybrid.errors import NetworkError


@dataclass
class Answer:
    logits: Tensor
    parts: tuple[Tensor, Tensor]
    label: str


@pytest.mark.parametrize(("batch", "chunks"), [(6, 3), (5, 4), (2, 8), (7, 1), (1, 3)])
def test_outputs_and_gradients_are_those_of_the_chunks_of_torch(batch: int, chunks: int) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    net.train(batch // chunks > 1)  # statistics of each micro-batch by itself
    x = torch.randn(batch, 3, dtype=torch.float64, requires_grad=True)
    found = call_in_chunks(net, (x,), {}, chunks)
    expected = torch.cat([net(part) for part in x.chunk(chunks)])
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    assert torch.equal(*gradients)


def test_what_has_the_batchs_size_is_split_and_all_else_is_passed_whole() -> None:
    seen: list[Any] = []

    def forward(x: Tensor, *rest: Any, **keywords: Any) -> Tensor:
        seen.append((rest, keywords))
        return x

    weights, scale, batch = torch.ones(3), torch.tensor(2.0), torch.arange(4)
    call_in_chunks(forward, (batch, weights, 7), {"scale": scale, "more": [batch, None]}, 2)
    for (rest, keywords), part in zip(seen, batch.chunk(2)):
        assert rest[0] is weights
        assert rest[1] == 7
        assert keywords["scale"] is scale
        assert torch.equal(keywords["more"][0], part)
        assert keywords["more"][1] is None
    assert len(seen) == 2


def test_nested_outputs_are_joined_part_by_part() -> None:
    def forward(x: Tensor) -> dict[str, Any]:
        return {"answer": Answer(x + 1, (x[:, :1], -x), "same"), "x": [x]}

    x = torch.randn(5, 3)
    found, expected = call_in_chunks(forward, (x,), {}, 2), forward(x)
    assert (type(found["answer"]), found["answer"].label) == (Answer, "same")
    assert torch.equal(found["answer"].logits, expected["answer"].logits)
    assert all(map(torch.equal, found["answer"].parts, expected["answer"].parts))
    assert torch.equal(found["x"][0], x)


def test_without_a_batch_there_is_one_call() -> None:
    assert call_in_chunks(lambda a, b: a + b, (1, torch.tensor(2)), {}, 4) == 3


def test_an_output_that_does_not_follow_the_batch_is_refused_by_its_shape() -> None:
    x = torch.ones(4, 3)
    for output, shape in ((lambda v: v.mean(), r"\(\)"), (lambda v: v.sum(0), r"\(3,\)")):
        with pytest.raises(NetworkError, match=rf"shape {shape} does not follow.*num_microbatches"):
            call_in_chunks(output, (x,), {}, 2)
        assert torch.equal(call_in_chunks(output, (x,), {}, 1), output(x))
