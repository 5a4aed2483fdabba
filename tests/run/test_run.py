"""What a run refuses before ranks share weights."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.run.run import refuse_composed


def test_quantised_weights_are_refused_before_they_are_sent() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse_composed(network)
    network[1].weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(NetworkError, match=r"'1\.weight' is a TwoTensor, .* numbers in other"):
        refuse_composed(network)
