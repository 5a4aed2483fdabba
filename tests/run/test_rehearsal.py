"""A look at a network before a run puts no more on a device than that can hold."""

import pytest
import torch
from torch import nn

from lightning_hybrid.stage import with_room_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(("share", "place"), [(1.9, CPU), (2.0, CUDA)])
def test_a_network_is_looked_at_on_a_gpu_only_if_it_has_room_for_it_twice(
    monkeypatch: pytest.MonkeyPatch, share: float, place: torch.device
) -> None:
    module = nn.BatchNorm1d(1000)
    size = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    free = {CUDA: (int(share * size), 10 * size)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", free.__getitem__)
    assert with_room_for(module, CUDA) == place
    assert with_room_for(module, CPU) == CPU
