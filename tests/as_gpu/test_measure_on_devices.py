"""Partitions are timed between events of a device's queue, which nobody waits for in between."""

import re

import pytest
import torch
from capturing import graph_of
from torch import nn

from lightning_hybrid.graph import network_partitions
from lightning_hybrid.profiling.measure import ROUNDS_ON_A_GPU, measure


def test_the_host_waits_for_the_first_round_and_after_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    record, synchronize = torch.cuda.Event.record, torch.cuda.Event.synchronize

    def recorded(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        done.append("r")
        record(event, stream)

    def waited(event: torch.cuda.Event) -> None:
        done.append("w")
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "record", recorded)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", waited)
    x = torch.ones(2, 4)
    graph = graph_of(nn.Linear(4, 4), x)
    table = measure(graph, network_partitions(graph), [x], device=torch.device("cuda:1"))
    # a forward and a backward, each between two events; the first of all warms up
    warm_up, one = "rrrr", "rrrr"
    assert re.fullmatch(f"{warm_up}{one}ww{one * (ROUNDS_ON_A_GPU - 1)}w+", "".join(done))
    assert table.forward_s[0] > 0
    assert table.backward_s[0] > 0
