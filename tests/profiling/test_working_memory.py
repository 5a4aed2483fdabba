"""Memory that is taken and given back is seen."""

import sys

import pytest
import torch
from capturing import graph_of
from torch import nn

from lightning_hybrid.graph import network_partitions
from lightning_hybrid.profiling.measure import PeakMemory, measure

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 2**20


def test_what_was_given_back_counts_each_time() -> None:
    for _ in range(2):
        peak = PeakMemory(torch.device("cpu"))
        torch.ones(48 * MIB, dtype=torch.uint8)
        assert 40 * MIB < peak.taken() < 64 * MIB


def test_the_columns_of_a_convolution_are_working_memory_and_not_activations() -> None:
    network = nn.ConvTranspose3d(1, 1, 5, padding=2).double()  # no kernel but that with columns
    x = torch.randn(1, 1, 48, 48, 48, dtype=torch.double)
    graph = graph_of(network, x)
    found = measure(graph, network_partitions(graph), [x], repeats=1)
    columns = 5**3 * 48**3 * 8
    assert found.working_bytes[0] >= 0.9 * columns
    assert found.activation_bytes[0] < 0.1 * columns
