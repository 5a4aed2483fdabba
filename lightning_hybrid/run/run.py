"""What a run is made from, on drivers and workers alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_hybrid._lightning import (
    Accelerator,
    FabricMixedPrecision,
    MixedPrecision,
    Precision,
    Trainer,
    TrainerFn,
    rank_zero_info,
)
from lightning_hybrid.config import Config
from lightning_hybrid.driver import present_bytes
from lightning_hybrid.planning import CalledNetwork, Plan, Site, make_plan
from lightning_hybrid.remote import take_again
from lightning_hybrid.run.building import DeferredModule, WholeModule
from lightning_hybrid.run.device_times import Measurement
from lightning_hybrid.run.framework import ByTrainer, Framework
from lightning_hybrid.run.progress import StartProgress, display_of
from lightning_hybrid.run.world import World
from lightning_hybrid.stage import StageOptions, broadcast_module
from lightning_hybrid.state import make_what_no_network_owns


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call of ``fit``, ``validate``, ``test``, ``predict`` or ``fabric.launch`` on this rank.

    Attributes:
        config: what the user has asked for.
        framework: what has begun it.
        module: the LightningModule, or what was given to ``fabric.setup``.
        world: all ranks.
        device: of this rank.
        accelerator: Lightning's.
        precision: Lightning's.
        fitting: whether the run trains.
        synchronised: whether batch statistics are taken over the replicas.
        building: who has the weights of the module.
        measurement: of this rank, for the log and for the check of the plan.
        shared: names of the parameters and buffers that all ranks have.
        plans: the plans in force, by name of the network; networks that are cut add theirs.
        progress: shows what is done before the first step.
    """

    config: Config
    framework: Framework
    module: nn.Module
    world: World
    device: torch.device
    accelerator: Accelerator
    precision: Precision
    fitting: bool
    synchronised: bool
    building: WholeModule | DeferredModule
    measurement: Measurement
    shared: frozenset[str]
    plans: dict[str, Plan]
    progress: StartProgress

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        config: Config,
        world: World,
        building: WholeModule | DeferredModule,
        plans: dict[str, Plan],
        *,
        synchronise: bool,
    ) -> "Run":
        """The run that a Trainer is about to begin; see the attributes.

        Args:
            trainer: Lightning's, which has set up the accelerator and the module.
            config: what the user has asked for.
            world: all ranks.
            building: who has the weights.
            plans: in force.
            synchronise: whether the user wants batch statistics of all replicas.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        device = trainer.strategy.root_device
        is_zero = world.coordinates.lightning_rank == 0
        return cls(
            config=config,
            framework=ByTrainer(trainer),
            module=trainer.lightning_module,
            world=world,
            device=device,
            accelerator=trainer.accelerator,
            precision=trainer.precision_plugin,
            fitting=fitting,
            synchronised=fitting and synchronise and world.coordinates.replicas > 1,
            building=building,
            measurement=Measurement(
                device, wanted=config.log_performance or (fitting and device.type == "cpu")
            ),
            shared=world.shared_names(trainer.lightning_module),
            plans=plans,
            progress=StartProgress(display_of(trainer, rank_zero_info) if is_zero else None),
        )

    @property
    def trainer(self) -> Trainer:
        """Lightning's, for what is refused under Fabric."""
        assert isinstance(self.framework, ByTrainer)
        return self.framework.trainer

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank is the driver of replica 0, which logs and saves."""
        return self.world.coordinates.lightning_rank == 0

    def stage_options(self) -> StageOptions:
        """How stages compute. On every rank alike: it may make a group."""
        statistics = self.world.mesh.statistics() if self.synchronised else None
        return StageOptions(
            self.config.compile_stages,
            statistics,
            self.config.settings.delayed_weights,
            self.config.gradient_shrinking,
        )

    def device_stats(self) -> dict[str, Any]:
        """What DeviceStatsMonitor logs of this rank's device."""
        # not by the instance, which on a driver asks the workers too
        return type(self.accelerator).get_device_stats(self.accelerator, self.device)

    def plan_network(
        self,
        network: CalledNetwork,
        microbatches: int,
        *,
        beside: Sequence[Plan],
        chosen: bool,
        optimizers: Sequence[Optimizer],
    ) -> Plan:
        """The plan of a network: the user's, or one that is made.

        Args:
            network: see :class:`lightning_hybrid.driver.network_options.Planner`.
            microbatches: see there.
            beside: see there.
            chosen: see there.
            optimizers: the user's, which need memory if the run trains.

        Raises:
            PlanError: the user's plan is for another network.
        """
        given, settings = self.config.plan, self.config.settings
        if given is not None and not chosen:
            shown = f"{network.name or 'self'!r} ({type(network.graph.network).__name__})"
            given.check_network([partition.name for partition in network.partitions], shown)
            return given
        coordinates = self.world.coordinates
        return make_plan(
            network,
            microbatches,
            # the user's cut points are for the network as a whole, and this is a part of it
            settings=replace(settings, allocation="exact") if chosen else settings,
            site=Site(
                replicas=coordinates.replicas,
                stages=len(settings.copies) or coordinates.ranks_per_replica,
                backend=self.world.mesh.backend,
                device=self.device,
                cluster=self.world.cluster,
                beside=beside,
                present_bytes=present_bytes(network.graph.network, self.device),
            ),
            optimizers=optimizers if self.fitting else None,
            advance=self.progress.of_profiling(network.name),
        )

    def take_again(self) -> None:
        """Have memory for weights that are lost since another rank has failed in an earlier run.

        Raises:
            DeferredError: this rank begins with its numbers, and has not all of them.
        """
        begins = self.world.coordinates.rank == 0
        take_again((*self.module.parameters(), *self.module.buffers()), empty=not begins)

    def share_weights(self) -> None:
        """On drivers: let all replicas begin with the weights of replica 0, on the CPU."""
        make_what_no_network_owns(self.module)
        broadcast_module(self.module, self.world.mesh.drivers)


def scalers_of(precision: Precision) -> list[GradScaler]:
    """The scaler of the loss, if there is one."""
    plugin: object = precision  # Fabric's is no subclass of the Trainer's
    if isinstance(plugin, MixedPrecision | FabricMixedPrecision) and plugin.scaler is not None:
        return [plugin.scaler]
    return []
