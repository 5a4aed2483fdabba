"""A tensor whose numbers are in a file is an ordinary one that has memory while it is read."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.remote import is_of_one_rank, is_unread, streaming, unread
from lightning_hybrid.remote.unread import leave_unread, left_unread

VALUE = torch.arange(12.0).view(3, 4)


class Reads:
    """Gives the bytes of a tensor, and counts how often."""

    def __init__(self, value: Tensor = VALUE) -> None:
        self.value, self.count = value, 0

    def __call__(self) -> Tensor:
        self.count += 1
        return self.value.clone().view(-1).view(torch.uint8)


def made(reads: Callable[[], Tensor] | None = None) -> Any:
    return unread(torch.empty_like(VALUE, device="meta"), reads or Reads())


def test_looking_reads_nothing_and_each_use_reads_once() -> None:
    reads = Reads()
    tensor = made(reads)
    assert tensor.shape == (3, 4)
    assert tensor.device.type == "cpu"
    view = tensor.detach()[1:].t()
    assert reads.count == 0
    assert torch.equal(view.clone(), VALUE[1:].t())
    assert tensor.sum().item() == VALUE.sum().item()
    assert reads.count == 2
    assert is_unread(tensor)
    assert not is_of_one_rank(tensor)


def test_what_is_written_to_stays_and_its_views_show_it() -> None:
    tensor, alone = made(), made()
    view = tensor[0]
    tensor.add_(1)
    torch._foreach_mul_([alone, torch.ones(1)], 2)
    assert torch.equal(tensor, VALUE + 1)
    assert torch.equal(view, VALUE[0] + 1)
    assert torch.equal(alone, VALUE * 2)
    assert not any(map(is_unread, (tensor, view, alone)))


def test_a_parameter_trains_on_from_the_gradient_that_it_has() -> None:
    parameter: Any = nn.Parameter(torch.zeros(3, 4))
    leave_unread(parameter, "weight", made())
    parameter.grad = made()
    (parameter * 2).sum().backward()
    assert isinstance(parameter, nn.Parameter)
    assert torch.equal(parameter, VALUE)
    assert torch.equal(parameter.grad, VALUE + 2)


def test_outside_a_tensor_has_the_memory_that_it_had() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    address, attributes = parameter.data_ptr(), dict(vars(parameter))
    with left_unread(parameter, "weight", made()):
        assert torch.equal(parameter, VALUE)
    assert type(parameter) is nn.Parameter
    assert parameter.data_ptr() == address
    assert vars(parameter) == attributes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_stream_is_the_file_of_ordinary_tensors(dtype: torch.dtype) -> None:
    value = VALUE.to(dtype)
    reads = Reads(value)
    tensor = unread(torch.empty_like(value, device="meta"), reads)
    files = io.BytesIO(), io.BytesIO()
    with streaming():
        torch.save({"all": tensor, "part": tensor[1:], "more": torch.ones(2)}, files[0])
    torch.save({"all": value, "part": value[1:], "more": torch.ones(2)}, files[1])
    for file in files:
        file.seek(0)
    found, expected = (torch.load(file) for file in files)
    assert found.keys() == expected.keys()
    for name, other in expected.items():
        assert torch.equal(found[name], other)
        assert found[name].device.type == "cpu"
        assert found[name].stride() == other.stride()
    assert is_unread(tensor)


def test_copies_and_pickles_are_ordinary() -> None:
    tensor = made()
    found = pickle.loads(pickle.dumps(tensor))
    assert type(found) is Tensor
    assert torch.equal(found, VALUE)
