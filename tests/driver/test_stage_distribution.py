"""Each rank of a replica gets the code and the weights of its stages, and no others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driven import Model, batches, model
from torch import nn

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.protocol import GiveFailure, Placement
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.driver.stage_distribution import Distribution
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.stage.rank_stages import StageOptions


def test_workers_own_what_their_stages_use(replicas: Any) -> None:
    module = model()
    replica = replicas(module, (1, 2, 1, 0))
    for rank, layers in ((1, (0, 4)), (2, (2,))):
        names = {f"net.{n}.{kind}" for n in layers for kind in ("weight", "bias")}
        assert set(replica.driver._ownership.tensors_of(rank)) == names
    assert replica.network.owned() == ["net.6.weight", "net.6.bias"]
    assert replica.network.placement.devices == (1, 2, 1, 0)


def test_the_drivers_weights_are_those_that_workers_begin_with(replicas: Any) -> None:
    torch.manual_seed(1)
    module, [value] = model(), batches(1)
    expected = module.net(value)
    replica = replicas(module, (1, 0))
    replica.driver.commands.ask(GiveFailure())  # the worker has its stage
    name = "net.0.weight"
    assert torch.equal(replica.modules[1].get_parameter(name), module.get_parameter(name))
    torch.testing.assert_close(replica(value), expected, rtol=1e-12, atol=1e-12)


def test_compiled_stages_of_the_driver_share_no_weight_with_another_rank() -> None:
    network = nn.ModuleDict({"first": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    nothing: Any = None
    device = torch.device("cpu")
    commands: Any = SimpleNamespace(workers=nothing, remote=SimpleNamespace(device=device))
    mesh: Any = SimpleNamespace(coordinates=Coordinates(0, 1, 2))
    options = DriverOptions(
        seed=0, stages=StageOptions(compiled=True), planner=nothing, progress=nothing
    )
    distribution = Distribution(Model(network), mesh, options, commands, nothing)
    codes: Any = [SimpleNamespace(owned=("first.weight",))] * 2
    with pytest.raises(NetworkError, match=r"compile_stages=True.*'net' shares 'first\.weight'"):
        distribution.distribute(0, "net", network, codes, Placement.of(codes, (1, 0), "gpipe"))
