"""A parameter gives its memory back, and gets it again."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.deferred import give_up, is_vacant, occupy, vacate

MAPS = Path("/proc/self/maps")


def test_a_vacant_parameter_is_the_same_object_of_the_same_size_without_memory() -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.float64), requires_grad=False)
    before = parameter._version
    vacate(parameter)
    assert is_vacant(parameter)
    assert parameter.untyped_storage().nbytes() == 0
    assert (parameter.shape, parameter.dtype) == ((3, 4), torch.float64)
    assert not parameter.requires_grad
    assert parameter._version == before
    occupy(parameter)
    assert not is_vacant(parameter)
    parameter.fill_(2)
    assert parameter.sum() == 24


@pytest.mark.skipif(not MAPS.exists(), reason="Linux's account of a process is not there")
def test_a_large_parameter_gets_memory_that_goes_back_to_the_system() -> None:
    parameter = nn.Parameter(torch.ones(1024, 1025))
    vacate(parameter)
    occupy(parameter)
    parameter.data.fill_(2)
    # (C's allocator puts its own data before a tensor, so that none begins a page)
    begin = parameter.data_ptr()
    assert begin % mmap.PAGESIZE == 0
    assert is_mapped(begin)
    vacate(parameter)
    assert not is_mapped(begin)


def is_mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    ranges = (line.split(maxsplit=1)[0].split("-") for line in MAPS.read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_what_something_else_shows_keeps_its_memory() -> None:
    parameter = nn.Parameter(torch.ones(3))
    shown = parameter.detach()
    vacate(parameter)
    assert not is_vacant(parameter)
    assert shown.tolist() == [1, 1, 1]


@pytest.mark.parametrize("compute", [torch.sum, lambda p: (p * p).sum()])
def test_what_a_graph_goes_back_through_keeps_its_memory(compute: Any) -> None:
    parameter = nn.Parameter(torch.ones(3))
    result = compute(parameter)
    vacate(parameter)
    assert not is_vacant(parameter)
    result.backward()
    assert parameter.grad is not None
    del result
    vacate(parameter)
    assert is_vacant(parameter)


def test_what_is_not_contiguous_keeps_its_memory() -> None:
    parameter = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    vacate(parameter)
    assert not is_vacant(parameter)


def test_nothing_is_vacant_that_holds_no_numbers_anyway() -> None:
    assert not is_vacant(torch.empty(0, 3))
    assert not is_vacant(torch.eye(2).to_sparse())


def test_what_nobody_brings_back_says_so_when_it_is_read() -> None:
    parameter, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    vacate(parameter)
    for each in (parameter, other):
        give_up(each, "net.weight")
        assert isinstance(each, nn.Parameter)
        with pytest.raises(DeferredError, match=r"'net.weight' is not here: its rank has failed"):
            each.sum()
