"""While tensors are elsewhere, whatever would compute with one raises and names it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.remote.hollow_network import NoMemory, watched

COMPUTE: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda w: w.sum(),
    "add": lambda w: w + 1,
    "norm": lambda w: w.norm(),
    "a view": lambda w: w.T[0].exp(),
    "an element": lambda w: w[0, 0].item(),
    "indices": lambda w: w[torch.tensor([1])],
    "linear": lambda w: nn.functional.linear(torch.ones(2, 4), w),
    "in place": lambda w: w.detach().mul_(2),
    "copied from": lambda w: torch.ones(4, 4).copy_(w),
    "copied to": lambda w: w.detach().copy_(torch.ones(4, 4)),
    "in a list": lambda w: torch.cat([torch.ones(4, 4), w]),
    "printed": repr,
    "compared": lambda w: torch.equal(w, torch.ones(4, 4)),
}


def unreadable(weight: Tensor) -> AbstractContextManager[None]:
    return watched({"net.weight": weight}, set(), ["net.weight"])


@pytest.mark.parametrize("name", COMPUTE)
def test_whatever_would_compute_with_one_raises(name: str) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(NoMemory), unreadable(weight):
        COMPUTE[name](weight)
    assert weight.equal(torch.ones(4, 4))


def test_the_error_names_the_tensor_and_the_operation() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(NoMemory, match=r"'sum' needs the numbers of 'net\.weight'"):  # noqa: SIM117
        with unreadable(weight):
            weight.sum()


def mean_or_zero(weight: Tensor) -> Tensor:
    try:
        return weight.mean()
    except Exception:
        return torch.zeros(())


def test_code_that_goes_another_way_after_an_error_does_not_hide_it() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(NoMemory), unreadable(weight):
        mean_or_zero(weight)


def test_looks_that_need_no_numbers_are_allowed() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with unreadable(weight):
        assert weight.detach().reshape(2, 8).shape == (2, 8)
        assert torch.zeros_like(weight).sum() == 0
        assert weight.new_ones(3).sum() == 3
        assert torch.ones(2, 2).sum() == 4
        assert torch.ones(2, 2).to_sparse().sum() == 4


def test_a_graph_is_captured_while_tensors_have_no_memory() -> None:
    weight, graphs = nn.Parameter(torch.ones(4, 4)), []

    def take(module: Any, _: Any) -> Callable[..., Any]:
        graphs.append(module)
        return lambda *values: [torch.zeros(())]

    compiler: Any = torch.compile
    with unreadable(weight):
        compiler(lambda w: (w * 2).sum(), backend=take)(weight)
        compiler(lambda w: (w * 2).sum(), backend=take)(weight)
    assert len(graphs) == 2
