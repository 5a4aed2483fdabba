"""What is replaced in torch while a network is captured does not disturb other threads."""

from collections.abc import Callable
from contextvars import copy_context
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.dynamo import Replaced, capture_settings
from lightning_hybrid.capture.rewritten_functions import captured_functions


class Layers(nn.Module):
    """All that something is replaced for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None)
        self.lstm, self.gru, self.rnn = nn.LSTM(3, 3), nn.GRU(3, 3), nn.RNN(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.gru(self.lstm(self.norm(x))[0])[0])[0]


def in_another_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(60)
    return found[0]


def test_layers_compute_the_same_in_another_thread_and_afterwards() -> None:
    torch.manual_seed(0)
    module, value = Layers(), torch.randn(4, 3)
    call, forward, names = nn.Module.__call__, nn.BatchNorm1d.forward, dict(vars(torch._VF))
    expected = module(value)
    with capture_settings(), captured_functions:
        assert torch.equal(in_another_thread(lambda: module(value)), expected)
        assert nn.Module.__call__ is call
    assert nn.BatchNorm1d.forward is forward
    assert vars(torch._VF) == names


def test_settings_are_of_one_thread_and_leave_nothing_in_it() -> None:
    shapes = torch.fx.experimental._config
    with capture_settings():
        pass
    kept = len(copy_context())
    with capture_settings():
        with capture_settings():
            assert in_another_thread(lambda: shapes.use_duck_shape)
        assert not shapes.use_duck_shape
    assert shapes.use_duck_shape
    assert len(copy_context()) == kept


def test_the_last_that_leaves_puts_back() -> None:
    owner = SimpleNamespace(function=min)
    context = Replaced((owner, "function", max), (owner, "missing", max))
    with context:
        in_another_thread(lambda: context.__enter__())
    assert owner.function is max
    context.__exit__()
    assert vars(owner) == {"function": min}
