"""The state of an optimizer is as large as predicted, before it exists."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.profiling.optimizer_states import optimizer_bytes

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_optimizer_bytes_are_those_that_it_keeps(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    network = nn.Linear(32, 32, bias=False)
    optimizer = kind(network.parameters(), **options)
    expected = optimizer_bytes(network, [optimizer])
    network(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    state = optimizer.state[network.weight].values()
    kept = sum(t.nbytes for t in state if isinstance(t, torch.Tensor) and t.numel() > 1)
    assert expected == {"weight": kept}


def test_parameters_of_other_networks_do_not_count() -> None:
    network, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*network.parameters(), *other.parameters()])
    assert optimizer_bytes(network, [optimizer]) == {"weight": 2 * 16}


def test_frozen_parameters_have_no_state() -> None:
    network = nn.Linear(3, 5)
    network.weight.requires_grad_(False)
    assert optimizer_bytes(network, [torch.optim.Adam(network.parameters())]) == {"bias": 40}


def test_replicas_that_divide_states_have_an_equal_part_each() -> None:
    network = nn.Linear(3, 5)
    optimizer = torch.optim.Adam(network.parameters())
    assert optimizer_bytes(network, [optimizer]) == {"weight": 120, "bias": 40}
    assert optimizer_bytes(network, [optimizer], 3) == {"weight": 40, "bias": 14}
