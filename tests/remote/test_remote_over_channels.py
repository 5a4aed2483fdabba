"""Tensors of other ranks, over the in-memory channels of a driver and two workers."""

from collections.abc import Iterator

import pytest
import torch
from driven import Replica, batches, let_go, model

from lightning_hybrid.comm.protocol import GiveFailure
from lightning_hybrid.remote.deferred import is_vacant
from lightning_hybrid.remote.proxy import RemoteKind


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica(model(), batches(1)[0], (1, 2, 0))
    yield made
    let_go(made)


def test_weights_of_other_ranks_are_read_and_written_over_their_channels(replica: Replica) -> None:
    replica.driver.commands.ask(GiveFailure())  # until here the workers take in their stages
    names = sorted(replica.driver.remote.names(RemoteKind.PARAMETER))
    modules = [dict(module.named_parameters()) for module in replica.modules.values()]
    theirs = {name: m[name] for m in modules for name in names if not is_vacant(m[name])}
    first = {name: theirs[name].detach().clone() for name in names}
    mine = dict(replica.model.named_parameters())
    with torch.no_grad():
        [theirs[name].add_(1) for name in names]
        replica.driver.remote.outdate(RemoteKind.PARAMETER)  # as by a step of theirs
        assert names
        assert all(torch.equal(mine[name] + 0, first[name] + 1) for name in names)
        [mine[name].mul_(2) for name in names]
    replica.end()
    for found in (mine, theirs):
        assert all(torch.equal(found[name], 2 * (first[name] + 1)) for name in names)
