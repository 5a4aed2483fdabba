"""What batches have read before their turn, and what something else changes then."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, WeightedRandomSampler

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.loader_attributes import (
    LoaderAttributes,
    attributes,
    own_generators,
    plain_attributes,
)


class Noise:
    strength = 0.0

    def __init__(self) -> None:
        self.strength = 0.1


class Scans(Dataset[Tensor]):
    def __init__(self) -> None:
        self.transforms = [Noise(), Noise()]
        self.buffer: deque[int] = deque()
        self.table = {"mode": "easy"}
        self.values = torch.zeros(100)
        self.trainer = Trainer(logger=False, accelerator="cpu")
        self.big = list(range(1000))
        self.weights = np.zeros(100)

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index]

    def __len__(self) -> int:
        return 100


CHANGES: dict[str, Callable[[Any], object]] = {
    r"dataset.dataset.transforms.1.strength": lambda scans: setattr(
        scans.transforms[1], "strength", 0.2
    ),
    "dataset.dataset.buffer": lambda scans: scans.buffer.append(1),
    "dataset.dataset.table.mode": lambda scans: scans.table.update(mode="hard"),
    "dataset.dataset.values": lambda scans: scans.values.add_(1),
    "dataset.dataset.big": lambda scans: scans.big.reverse(),
    "dataset.dataset.weights": lambda scans: scans.weights.__setitem__(3, 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_look_is_named(name: str) -> None:
    scans = Scans()
    seen = LoaderAttributes(DataLoader(Subset(scans, range(50))))
    seen.look()
    seen.check()
    CHANGES[name](scans)
    with pytest.raises(NetworkError, match=f" {name} of the train loader was changed"):
        seen.check()
    seen.look()  # a batch was loaded, which has seen it
    seen.check()


def test_loader_processes_have_copies_that_hear_of_no_change() -> None:
    scans = Scans()
    sampler = WeightedRandomSampler(torch.ones(100), 100)
    seen = LoaderAttributes(DataLoader(scans, sampler=sampler, num_workers=1))
    seen.look()
    scans.buffer.append(1)
    seen.check()
    sampler.weights[0] = 2  # which is here
    with pytest.raises(NetworkError, match=r"sampler\.weights of the train loader"):
        seen.check()


def test_an_iteration_changes_nothing_of_the_loader() -> None:
    loader = DataLoader(Scans(), shuffle=True)
    seen = LoaderAttributes(loader)
    seen.look()
    next(iter(loader))
    seen.check()


class Odd(dict[str, Any]):
    """Answers to nothing."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __len__(self) -> int:
        raise RuntimeError

    items = __iter__ = __len__  # type: ignore[assignment]


class Proxy:
    """Says that it is another one."""

    __slots__ = ("other",)
    __class__ = property(lambda self: list)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_objects_that_fail_when_they_are_looked_at_are_left_alone() -> None:
    scans: Any = Scans()
    scans.odd, scans.proxy = Odd(a=1), Proxy()
    seen = LoaderAttributes(DataLoader(scans))
    seen.look()
    dict.__setitem__(scans.odd, "a", 2)
    with pytest.raises(NetworkError, match=r"dataset\.odd"):
        seen.check()


def test_the_trainer_and_networks_are_not_looked_into() -> None:
    scans = Scans()
    scans.table["network"] = nn.Linear(2, 2)  # type: ignore[assignment]
    names = [name for name, _ in attributes({"": scans})]
    assert "trainer" in names
    assert not any(name.startswith(("trainer.", "table.network.")) for name in names)


def test_entries_are_looked_at_without_running_code_of_theirs() -> None:
    class Entry:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

    scans: Any = Scans()
    scans.entries = [Entry() for _ in range(40)]
    seen = LoaderAttributes(DataLoader(scans))
    seen.look()
    seen.check()
    scans.entries[3] = Entry()
    with pytest.raises(NetworkError, match=r"dataset\.entries of"):
        seen.check()


def test_generators_of_a_large_network_do_not_hide_those_of_the_data() -> None:
    network = nn.ModuleList([nn.ReLU() for _ in range(1500)])
    network[1400].own = torch.Generator()
    scans: Any = Scans()
    scans.own = torch.Generator()
    found = own_generators({"M": network, "the train loader": DataLoader(scans)})
    assert {*found} == {"M.1400.own", "the train loader.dataset.own"}


def test_generators_are_found_wherever_they_are_kept() -> None:
    scans: Any = Scans()
    scans.transforms[0].torch = torch.Generator()
    scans.table["numpy"] = np.random.default_rng(0)
    scans.python, scans.old = random.Random(0), np.random.RandomState(0)
    found = own_generators({"data": DataLoader(scans)})
    assert {*found} == {
        "data.dataset.transforms.0.torch",
        "data.dataset.table.numpy",
        "data.dataset.python",
        "data.dataset.old",
    }


def test_plain_attributes_are_those_of_the_object_itself() -> None:
    assert plain_attributes(Noise()) == {"strength": 0.1}
    assert "training" in plain_attributes(nn.Linear(2, 2))
