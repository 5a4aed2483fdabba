"""What a signal's handler raises while a network is captured is no fault of the network."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.capture import Capture


@pytest.mark.filterwarnings("ignore")  # Python's word on forks of programs with threads
def test_a_loaders_process_that_is_killed_meanwhile_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader: Any = iter(DataLoader(range(64), num_workers=1, multiprocessing_context="fork"))
    next(loader)

    def killed(*_: Any) -> None:
        os.kill(loader._workers[0].pid, signal.SIGKILL)
        time.sleep(30)  # the handler of SIGCHLD ends it

    monkeypatch.setattr(Capture, "_take", killed)
    network = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid.* is killed by signal: Kill"):
        Capture(network, network.forward, lambda *_: None)((torch.ones(2, 2),), {})
