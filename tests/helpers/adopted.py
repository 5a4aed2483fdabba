"""A module whose networks are found, planned and cut at their first call, in one process."""

from copy import deepcopy
from typing import Any

import torch
from driven import Model, Ranks
from torch import Tensor, nn

from lightning_hybrid.driver.discovery import Discovery
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.driver.progress import StartProgress
from lightning_hybrid.driver.verification import Verify
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.profiling.called_network import CalledNetwork
from lightning_hybrid.stage import StageOptions


class Driven:
    """A module whose networks are found and cut, two micro-batches each.

    Args:
        ranks: makes the ranks.
        network: the network.
        workers: how many.
        verify: which calls are compared with what the network's Python gives.
        devices: of each stage its device, or those of its copies; empty: each worker has a stage.
        options: further ones of the driver.
    """

    def __init__(
        self,
        ranks: Any,
        network: nn.Module,
        workers: int = 1,
        verify: Verify = False,
        devices: tuple[int | tuple[int, ...], ...] = (),
        **options: Any,
    ) -> None:
        self._devices = devices
        torch.manual_seed(0)
        self.module = Model(network).double()
        self.reference = deepcopy(self.module).net
        self.lines: list[str] = []
        self.asked: list[bool] = []
        self.plans: dict[str, Plan] = {}
        self.ranks: Ranks = ranks(self.module, workers)
        self.discovery = Discovery(
            self.module,
            self.ranks.driver,
            self.ranks.mesh(0),
            DriverOptions(
                seed=0,
                stages=StageOptions(),
                trains=True,
                automatic=False,
                say=self.lines.append,
                progress=StartProgress(None),
                verify=verify,
                **{"microbatches": 2, "planner": self.plan, **options},
            ),
            self.plans,
        )

    def plan(self, network: CalledNetwork, microbatches: int, *_: Any) -> Plan:
        stages = len(self._devices) or len(self.ranks.modules) + 1
        cuts = tuple(network.partitions[k].name for k in range(1, stages))
        return Plan(
            replicas=1,
            stages=stages,
            microbatches=microbatches,
            schedule="gpipe",
            cuts=cuts,
            devices=self._devices,
        )

    def assert_same(self, value: Tensor) -> None:
        """Outputs and gradients are those of one device."""
        mine, theirs = self.module.net(value), self.reference(value)
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        for network, output in ((self.module.net, mine), (self.reference, theirs)):
            network.zero_grad()
            output.square().sum().backward()
        for here, there in zip(self.module.net.parameters(), self.reference.parameters()):
            torch.testing.assert_close(here.grad, there.grad, rtol=1e-12, atol=1e-12)

    @property
    def remote(self) -> set[str]:
        """Names of what workers own."""
        owned = self.ranks.driver._ownership
        return {name for rank in self.ranks.modules for name in owned.tensors_of(rank)}
