"""What is exchanged in torch while a network is captured does not disturb other threads."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.capture import Exchanged, capture_settings
from lightning_hybrid.capture.rewritten_functions import captured_averages
from lightning_hybrid.graph.recurrent_layers import captured_recurrence


class Layers(nn.Module):
    """All that something is exchanged for."""

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
    with capture_settings(), captured_averages, captured_recurrence:
        assert torch.equal(in_another_thread(lambda: module(value)), expected)
        assert nn.Module.__call__ is call
    assert nn.BatchNorm1d.forward is forward
    assert vars(torch._VF) == names


def test_the_last_that_leaves_puts_back() -> None:
    notes: list[str] = []
    context = Exchanged(lambda: notes.append("put"), lambda: notes.append("back"))
    with context:
        in_another_thread(lambda: context.__enter__())
    assert notes == ["put"]
    context.__exit__()
    assert notes == ["put", "back"]
