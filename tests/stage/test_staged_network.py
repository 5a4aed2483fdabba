"""Which rank owns what, and how ranks name it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_hybrid.comm.protocol import Forward
from lightning_hybrid.stage.staged_network import StagedNetwork, write_tensors


def network(module: nn.Module) -> StagedNetwork:
    engine: Any = SimpleNamespace(owned=[])
    return StagedNetwork(0, "net", module, engine)


def test_a_worker_numbers_keys_as_its_driver_does_though_it_misses_some() -> None:
    driver, worker = network(nn.Linear(2, 2)), network(nn.Linear(2, 2))
    keys: list[Any] = [SimpleNamespace(grad=False) for _ in range(3)]
    numbers = [driver.add_key(key) for key in keys]
    for key, number in (pair for pair in zip(keys, numbers) if pair[1] != 1):  # one was not sent
        worker.add_key(key, number)
    opened = worker.open(Forward(0, 1, 0, numbers[2], True, False, ahead=False))
    assert opened.key is keys[2]


def test_names_of_tensors_are_looked_up_once_for_all_that_are_written() -> None:
    class Counted(nn.Module):
        looks = 0

        def named_parameters(self, *arguments: Any, **keywords: Any) -> Any:
            self.looks += 1
            return super().named_parameters(*arguments, **keywords)

    module = Counted()
    module.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(10))
    names = [name for name, _ in nn.Module.named_parameters(module)]
    write_tensors(module, ((name, torch.ones(())) for name in names))
    assert module.looks == 1
    assert all((parameter == 1).all() for parameter in module.parameters())
