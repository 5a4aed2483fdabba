"""Weights whose memory something else shows stay with no other rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from owned_elsewhere import World
from torch import Tensor, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.remote.remote_places import refuse_shared

TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "row": lambda p: p.detach()[0],
    "transposed": lambda p: p.detach().T,
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_a_view_that_is_kept_is_refused(take: Callable[[Tensor], Tensor]) -> None:
    kept: list[Any] = []
    with pytest.raises(NetworkError, match=r"shows the memory of '0.weight', which another rank"):
        World(lambda module: kept.append(take(module[0].weight)))


def test_a_view_that_nobody_uses_is_no_reason() -> None:
    module = nn.Linear(2, 3)
    circle: list[Any] = [module.weight.data]
    circle.append(circle)
    del circle
    refuse_shared(module, ["weight"])


def test_copies_and_other_objects_of_a_module_are_no_reason() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2))
    network.load_state_dict(network.state_dict())
    normed = nn.utils.spectral_norm(nn.Linear(2, 2))  # which has an attribute that is a view
    kept = [p.data.clone() for p in network.parameters()]
    for module in (network, normed):
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        refuse_shared(module, names)
    assert kept


def test_parameters_in_one_memory_are_refused() -> None:
    def tie(module: nn.Sequential) -> None:
        module[2].weight.data = module[0].weight.data.view(3, 4)[:2]

    with pytest.raises(NetworkError, match=r"memory of '0.weight'.* write `module.a = module.b`"):
        World(tie)


def test_only_memory_that_is_really_shared_counts() -> None:
    module = nn.Module()

    def parts() -> list[Tensor]:
        flat = torch.zeros(10)
        return [flat[:4].data, flat[4:].data, flat[8:].data]

    weight, rest, last = parts()
    module.weight, module.rest = nn.Parameter(weight), nn.Parameter(rest)
    del weight, rest
    module.register_buffer("last", last)
    refuse_shared(module, ["weight"])
    with pytest.raises(NetworkError, match="'rest'"):
        refuse_shared(module, ["rest"])
