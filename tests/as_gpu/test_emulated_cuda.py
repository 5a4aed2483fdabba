"""The devices themselves: numbers of the CPU, errors of GPUs, and what the host waits for."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from emulated_cuda import EVENTS
from torch import Tensor, nn

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 4), (2, 4)),
    "convolution": (lambda: nn.Conv3d(1, 4, 3, stride=2), (2, 1, 6, 6, 6)),
    "batch norm": (lambda: nn.BatchNorm3d(2), (2, 2, 4, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 4, 4)),
    "max pool": (lambda: nn.MaxPool3d(2), (2, 1, 6, 6, 6)),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool3d(2), (2, 1, 6, 6, 6)),
    "dropout": (lambda: nn.Dropout(0.3), (20, 30)),
    "lstm": (lambda: nn.LSTM(4, 5, 2, dropout=0.2, bidirectional=True), (3, 2, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), (3, 2, 8)),
}


def run(layer: nn.Module, value: Tensor) -> list[Tensor]:
    """What it gives, and all gradients, on the host."""
    torch.manual_seed(5)
    value = value.clone().requires_grad_()
    output: Any = layer(value)
    output = output[0] if isinstance(output, tuple) else output
    output.square().sum().backward()
    return [each.cpu() for each in (output, value.grad, *(p.grad for p in layer.parameters()))]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_numbers_of_the_cpu(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, value = make().double(), torch.randn(shape, dtype=torch.float64)
    expected = run(layer, value)
    found = run(deepcopy(layer).to("cuda:1"), value.to("cuda:1"))
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_tensors_of_two_devices_do_not_meet() -> None:
    value = torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"at least two devices, cuda:1 and cuda:0"):
        value + torch.ones(3, device="cuda:0")
    with pytest.raises(RuntimeError, match=r"shape \[3\] on cpu"):
        value.add_(torch.ones(3))
    assert torch.equal(value[torch.tensor([0, 2])].cpu() + torch.tensor(1.0), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("kind", "ask"),
    [
        ("item", lambda value: value.sum().item()),
        ("item", lambda value: bool(value.any())),
        ("device to host", lambda value: value.cpu()),
        ("device to host", lambda value: torch.empty(3).copy_(value)),
        ("host to device", lambda value: value.new_tensor([1.0])),
        ("device to device", lambda value: value.to("cuda:2")),
        ("blocks", lambda value: value.nonzero()),
        ("blocks", lambda value: torch.cuda.synchronize()),
    ],
)
def test_what_the_host_waits_for_is_seen_with_its_line(
    kind: str, ask: Callable[[Tensor], object]
) -> None:
    value = torch.ones(3, device="cuda:1")
    with EVENTS.during() as events:
        value.square().relu_().sum(0)
    assert not events
    with EVENTS.during() as events:
        ask(value)
    assert kind in {seen for seen, _ in events}
    assert all("test_emulated_cuda.py:" in where for _, where in events)


def test_the_bytes_of_each_device_are_counted() -> None:
    before = [torch.cuda.memory_allocated(device) for device in (1, 2)]
    torch.cuda.reset_peak_memory_stats(1)
    value = torch.empty(1000, device="cuda:1")
    view = value[:10]
    del value
    assert torch.cuda.memory_allocated(1) == before[0] + 4000
    del view
    assert [torch.cuda.memory_allocated(device) for device in (1, 2)] == before
    assert torch.cuda.max_memory_allocated(1) == before[0] + 4000


def test_memory_that_is_resized_or_exchanged_is_still_the_devices() -> None:
    value, other = torch.arange(4.0, device="cuda:1"), torch.ones(2, 2, device="cuda:1")
    alias = value.view(2, 2)
    value.resize_(5000)[4:] = 1
    assert value.device == alias.device == torch.device("cuda:1")
    assert torch.equal(alias.cpu(), torch.arange(4.0).view(2, 2))
    value.set_(other)
    other.add_(1)
    assert value.tolist() == [[2, 2], [2, 2]]
    restored = deepcopy(other)
    assert restored.device == other.device
    assert restored.data_ptr() != other.data_ptr()


def test_each_device_draws_from_its_own_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    drawn = [torch.rand(4, device=f"cuda:{n}").cpu() for n in (0, 1)]
    assert all(torch.equal(each, expected) for each in drawn)
    state = torch.cuda.get_rng_state(1)
    again = torch.rand(4, device="cuda:1")
    torch.cuda.set_rng_state(state, 1)
    assert torch.equal(torch.rand(4, device="cuda:1"), again)
